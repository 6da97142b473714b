"""What tests ask vLLM's workers beside its own calls (`worker_extension_cls`)."""

import hashlib

import torch

from weightwire import AbortedError


class Inspect:
    """Mixed into the worker."""

    def recorded_rows(self):
        target = self.weight_transfer_engine._targets[False]
        return [{**row, "ops": [list(op) for op in row["ops"]]} for row in target.rows]

    def draft_digests(self):
        """Of every parameter of the draft model and, where kernels hide the weights, of what the module makes of a
        fixed input."""
        found = {}
        for name, module in self.get_draft_model().named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None and parameter.numel():
                    found[f"{name}.{attribute}"] = _digest(parameter)
            if hasattr(module, "cpu_linear"):
                width = next(w for w in (getattr(module, "input_size_per_partition", 0),
                                         getattr(module, "input_size", 0), module.weight.shape[-1]) if w)
                x = torch.linspace(-1, 1, 3 * width).view(3, width).to(module.weight.dtype)
                found[f"{name}()"] = _digest(module.quant_method.apply(module, x, None))
        return found


    def parameter_digests(self):
        """Of every parameter of the model."""
        return {name: _digest(tensor) for name, tensor in self.get_model().named_parameters() if tensor.numel()}

    def kv_scales(self):
        """What attention divides keys and values by, as a tensor and as a number."""
        return {f"{name}.{scale}": float(getattr(module, scale)) for name, module in self.get_model().named_modules()
                if hasattr(module, "_k_scale") for scale in ("_k_scale", "_k_scale_float", "_v_scale", "_v_scale_float")}

    def be_fenced(self):
        """The engine: the session of one rank ends. Its workers attach again by themselves."""
        if torch.distributed.get_rank() == 0:
            self.weight_transfer_engine._subscriber._session.leave(AbortedError("for a test", code="ABORTED"))

    def lose_parameters(self, only=None):
        """As sleep level 2 does: the weights' memory holds something else."""
        with torch.no_grad():
            for name, tensor in self.get_model().named_parameters():
                if tensor.numel() and (only is None or name in only):
                    tensor.zero_()


def _digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def beside() -> type:
    """Inspect, of an engine beside its trainer. The second tensor of its next hand-over can be told to fail."""
    from weightwire.vllm.colocated import Worker

    class Beside(Inspect, Worker):
        def fail_once(self, rank):
            if torch.distributed.get_rank() != rank:
                return
            hand_over, count = self._weightwire_hand_over, [0]
            fill = hand_over.fill

            def failing(*arguments):
                count[0] += 1
                if count[0] == 5:
                    hand_over.fill = fill
                    raise OSError("for a test")
                return fill(*arguments)
            hand_over.fill = failing
    return Beside


def __getattr__(name):  # weightwire is imported where it is asked for
    if name == "Beside":
        return beside()
    raise AttributeError(name)
