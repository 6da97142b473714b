"""What tests ask vLLM's workers beside its own calls (`worker_extension_cls`)."""


class Inspect:
    """Mixed into the worker."""

    def recorded_rows(self):
        target = self.weight_transfer_engine._targets[False]
        return [{**row, "ops": [list(op) for op in row["ops"]]} for row in target.rows]
