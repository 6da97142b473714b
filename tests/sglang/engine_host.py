"""A real SGLang engine in a process of its own, for `Engine.shutdown` ends every child of its process. One JSON object a line:
{"do": name, …} on stdin, {"answer": …} or {"error": …} on stdout.

    python engine_host.py MODEL TP [OPTIONS]

OPTIONS: more of sglang.Engine, as JSON. On a host that is not an engine's first the engine is made, and nothing is asked of it.
"""

import asyncio
import json
import os
import sys

PROMPTS = [[5, 6, 7, 8, 9, 10], [900, 3, 77], list(range(100, 140)), [512] * 5]


class Host:
    def __init__(self, model: str, tp: int, **options):
        os.environ.update(SGLANG_USE_CPU_ENGINE="1", SGLANG_NCCL_SO_PATH="/nonexistent")
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, range(tp))))
        import sglang
        self.engine = sglang.Engine(model_path=model, device="cpu", attention_backend="torch_native", tp_size=tp, dtype="bfloat16",
                                    skip_tokenizer_init=True, max_total_tokens=4096, max_running_requests=8, log_level="warning", **options)
        self.running = None

    @staticmethod
    def told(answer):
        meta = answer["meta_info"]
        return {"tokens": answer["output_ids"], "spans": [[span["version"], span["start"], span["end"]] for span in meta["weight_versions"]],
                "logprobs": [entry[0].hex() for entry in meta["output_token_logprobs"]]}

    def request(self, prompt, tokens):
        return dict(input_ids=prompt, sampling_params=dict(temperature=0, max_new_tokens=tokens, ignore_eos=True), return_logprob=True)

    def answers(self, afresh=False):
        """One prompt after another, so that a batch is the same each time. `afresh`: without what another request has left in the cache; a
        prompt whose beginning lies there is computed in other pieces, which on some CPUs (without AMX) rounds otherwise."""
        if afresh:
            self.engine.flush_cache()
        return [self.told(self.engine.generate(**self.request(prompt, 16))) for prompt in PROMPTS]

    def continued(self, prompt, tokens):
        return self.told(self.engine.generate(**self.request(prompt, tokens)))

    def from_disk(self, model):
        """SGLang's own way."""
        return self.engine.update_weights_from_disk(model)

    def begin(self, prompt, tokens):
        """A request in flight; some of its tokens are there when this returns."""
        seen = asyncio.Event()

        async def run():
            last = None
            async for answer in await self.engine.async_generate(**self.request(prompt, tokens), stream=True):
                last = answer
                if len(answer["output_ids"]) >= 3:
                    seen.set()
            return last
        self.running = self.engine.loop.create_task(run())
        self.engine.loop.run_until_complete(asyncio.wait_for(seen.wait(), 300))

    def result(self):
        return self.told(self.engine.loop.run_until_complete(self.running))

    def update(self, engine, checkpoint, version, agent, deadline, pause="", **more):
        import weightwire.sglang as ww
        ww.update(self.engine, ww.ticket(engine, checkpoint, version, agent=agent, deadline=deadline, **more), pause=pause)

    def send_tickets_that_differ(self, engine, checkpoint, version, agent):
        """Of each ticket that the second rank cannot read, or that is another one there: what SGLang answers, within 30 s."""
        import weightwire.sglang as ww
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        good, other = (self.engine._serialize_tensors_per_rank(ww.ticket(engine, checkpoint, number, agent=agent), ww.LOADER)[0]
                       for number in (version, version - 1))
        said = []
        for payloads in ([good], [good, other], [good, good[:-9]]):
            request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, load_format=ww.LOADER, flush_cache=False)
            answers = self.engine.loop.run_until_complete(asyncio.wait_for(ww._ask(self.engine.tokenizer_manager, request), 30))
            said += [[answer.success, answer.message] for answer in answers]
        return said


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints is no answer
    host = Host(sys.argv[1], int(sys.argv[2]), **json.loads(sys.argv[3] if len(sys.argv) > 3 else "{}"))
    print(json.dumps({"answer": "ready"}), file=out, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"answer": getattr(host, command.pop("do"))(**command)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)
    host.engine.shutdown()


if __name__ == "__main__":
    main()
