"""Under torchrun: the proof that engine and trainer compute the same, as it is and with planted errors; JSON of rank 0.

torchrun --nproc_per_node=N -m tests.function_proof_worker FOLDER OUT TP_SIZE
"""

import json
import math
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy
import torch

import lib.model.attention
from lib.dist import SINGLE, World, init_distributed, shutdown_distributed
from lib.engine import function_proof
from lib.engine.engine import RolloutEngine
from lib.engine.rollout_config import RolloutConfig
from lib.engine.weight_sync import WeightSync
from lib.errors import LockstepError
from lib.model.batching import make_batch
from lib.model.forward import forward_policy
from lib.model.fsdp import FSDPConfig, full_tensor, load_policy, reshard
from lib.model.networks import ModelConfig
from tests.rollout_worker import SAMPLES, generate, summary
from tests.tiny import make_model, make_tokenizer

NORM = "model.norm.weight"
TRANSPOSED = "model.layers.0.self_attn.k_proj.weight"  # a square one
CASES = ("qwen3", "llama", "bfloat16")
"""Untied and long enough; tied, with short responses, stop strings and offloading; qwen3 in bfloat16."""


class Bench:
    """An engine and a policy of equal weights."""

    def __init__(self, case: str, folder: Path, tp_size: int, world: World) -> None:
        self.case, self.world, self.path = case, world, str(folder / case)
        short = case == "llama"
        if world.rank == 0:
            make_tokenizer(make_model(folder / case, kind="llama" if short else "qwen3", tied=short))
        world.gather(None)
        self.dtype = "bfloat16" if case == "bfloat16" else "float32"
        self.max_prompt_len = 3 if short else 240
        cfg = RolloutConfig(
            tensor_model_parallel_size=tp_size, max_response_len=5 if short else 16, max_num_seqs=64,
            max_num_batched_tokens=2048, cpu_kv_cache_gib=0.1, stop=tuple("abcdefghijkl") if short else (),
            log_probs=False,
        )  # fmt: skip
        self.engine = RolloutEngine(
            cfg, self.path, dtype=self.dtype, max_prompt_len=self.max_prompt_len, most_responses=64,
            stop_token_ids=list(range(0, 200, 2)), world=world, seed=5,
        )  # fmt: skip
        self.engine.sleep()
        self.policy = load_policy(ModelConfig(dtype=self.dtype), self.path, FSDPConfig(), world)
        self.weight_sync = WeightSync(self.policy, self.engine, fsdp=FSDPConfig(param_offload=short))
        self.weight_sync.wake(names=None, time=nullcontext)

    def sync(self) -> None:
        self.engine.sleep()
        self.weight_sync.wake(names=[], time=nullcontext)

    def prove(self) -> dict:
        """What came of a proof, with the most seconds of a rank."""
        start = time.perf_counter()
        try:
            proof = function_proof.prove_function(
                self.weight_sync, self.path, dtype=getattr(torch, self.dtype), max_prompt_len=self.max_prompt_len,
                reserved_bytes=7,
            )  # fmt: skip
        except LockstepError as error:
            assert error.together and len(set(self.world.gather(str(error)))) == 1
            return {"error": f"{type(error).__name__}: {error}"}
        return vars(proof) | {"seconds": max(self.world.gather(time.perf_counter() - start))}

    def with_error(self, plant) -> str:
        """What a proof says of an engine whose parameters `plant(held)` has changed; they are mended then."""
        with torch.no_grad():
            plant(self.engine.parameters())
        said = self.prove().get("error", "nothing")
        self.sync()
        return said

    def transpose(self, held) -> None:
        whole = full_tensor(self.policy.get_parameter(TRANSPOSED), held[NORM].dtype).t().contiguous()
        for box in (box for boxes in self.weight_sync.layout.boxes.values() for box in boxes):
            if box.source == TRANSPOSED:
                box.place(held[box.target]).copy_(box.part(whole))

    def with_leak(self) -> str:
        attend = lib.model.attention._attend_each
        lib.model.attention._attend_each = lambda q, k, v, borders, *of: attend(q, k, v, borders[[0, -1]], *of)
        try:
            return self.prove()["error"]
        finally:
            lib.model.attention._attend_each = attend
            self.sync()

    def events(self) -> list:
        """In which order a proof takes and gives memory."""
        events, forward = [], function_proof.forward_policy
        sleep, wake, onload = self.engine.sleep, self.weight_sync.wake, function_proof.onload
        self.engine.sleep = lambda: events.append("sleep") or sleep()
        self.weight_sync.wake = lambda **named: events.append(f"wake, {named['reserved_bytes']}") or wake(**named)
        function_proof.onload = lambda *of: events.append("onload") or onload(*of)
        function_proof.forward_policy = lambda *of, **named: events.append("forward") or forward(*of, **named)
        self.prove()
        self.engine.sleep, self.weight_sync.wake, function_proof.onload = sleep, wake, onload
        function_proof.forward_policy = forward
        return events

    def with_infinity(self) -> str:
        """Of a single log-prob that the engine reports."""
        generate = self.engine.generate

        def broken(*of, **named):
            for place, group in enumerate(generate(*of, **named)):
                group[0].rollout_log_probs[1] = math.inf if place == 1 else -1.0
                yield group

        self.engine.generate = broken
        try:
            return self.prove()["error"]
        finally:
            self.engine.generate = generate
            self.sync()


def skip(held) -> None:
    """The second layer, whose two parts then add nothing."""
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        held[f"model.layers.1.{name}.weight"].zero_()


def states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def look(bench: Bench) -> dict:
    """What the proof says of one model."""
    world, engine = bench.world, bench.engine
    before, rollouts = states(), summary(generate(engine, SAMPLES[:4], world, max_response_len=4))
    found = {"as it is": bench.prove(), "again": bench.prove()}
    found["no random state is changed"] = states() == before
    found["events"] = bench.events()
    found["verified after it"] = bench.weight_sync.verify() == len(engine.parameters())
    found["rollouts are the same"] = summary(generate(engine, SAMPLES[:4], world, max_response_len=4)) == rollouts
    found["logits x 1.1"] = bench.with_error(lambda held: held[NORM].mul_(1.1))
    found["a layer skipped"] = bench.with_error(skip)
    found["transposed"] = bench.with_error(bench.transpose)
    found["leak"] = bench.with_leak()
    found["engine not finite"] = bench.with_infinity()
    own = bench.policy.get_parameter(NORM).data.to_local()
    if bench.case == "bfloat16":
        found |= look_at_rounding(bench)
    elif engine.num_replicas > 1:
        mends = engine.replica == 0
        found["one replica"] = bench.with_error(lambda held: held[NORM].mul_(1.0 if mends else 1.1))
    if len(own):  # shards of small tensors may be empty
        own[0] = torch.nan
    found["trainer not finite"] = bench.prove()["error"]
    return found


def sharpen(policy) -> None:
    """Attention and logits so large that bfloat16 rounds by more than MAX_DIFF."""
    reshard(policy)
    for name, parameter in policy.named_parameters():
        if name == NORM or "q_norm" in name:
            parameter.data.to_local().mul_(4 if name == NORM else 16)


def look_at_rounding(bench: Bench) -> dict:
    """The comparison with float32."""
    copies, copy = [], function_proof._float32_copy
    function_proof._float32_copy = lambda *of: copies.append(copy(*of)) or copies[-1]
    found = {"copies as it is": bench.prove().get("error", len(copies))}
    exact = load_policy(ModelConfig(dtype="float32"), bench.path, FSDPConfig(), bench.world)
    sharpen(exact)
    sharpen(bench.policy)
    bench.sync()
    rollouts = function_proof._sample(bench.engine, bench.policy.config.vocab_size, bench.max_prompt_len)
    batch = make_batch(rollouts, SINGLE, mini_batch_size=len(rollouts))
    with torch.no_grad():
        own, in_float32 = (forward_policy(p, batch, temperature=1.0)[0] for p in (bench.policy, exact))
    found["rounding"] = float((own - in_float32).abs().mean())  # all responses are equally long
    found["sharpened"] = bench.prove() | {"copies": len(copies)}
    with torch.no_grad():
        copied = forward_policy(copies[-1], batch, temperature=1.0)[0]
    found["the copy is the float32 model"] = torch.equal(copied, in_float32)
    found["sharpened, a layer skipped"] = bench.with_error(skip)
    return found


def main(folder: str, out: str, tp_size: str) -> None:
    """Looks at every case, one engine after the other; with several replicas at one."""
    world = init_distributed()
    cases = CASES if world.size == int(tp_size) else CASES[:1]
    found = {case: look(Bench(case, Path(folder), int(tp_size), world)) for case in cases}
    if world.rank == 0:
        Path(out).write_text(json.dumps(found))
    shutdown_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])
