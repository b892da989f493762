"""Under torchrun: the layout of each family's engine, learned from numbers that occur once; JSON from rank 0.

torchrun --nproc_per_node=N -m tests.layout_worker FOLDER OUT TP_SIZE
"""

import json
import sys
from pathlib import Path

import torch

from lib.dist import World, init_distributed, shutdown_distributed
from lib.engine.engine import RolloutEngine
from lib.engine.rollout_config import RolloutConfig
from lib.engine.weight_sync import WeightSync
from lib.errors import WeightSyncError
from lib.model.fsdp import FSDPConfig, load_policy
from lib.model.networks import CausalPolicy, ModelConfig
from tests.tiny import make_model

NORM = "model.norm.weight"
KINDS = ("qwen3", "qwen2", "llama", "mistral")


def number(policy: CausalPolicy) -> dict[str, int]:
    """Gives every element of the policy a number of its own, which float32 holds exactly; {tensor: its first one}."""
    first, at = {}, 1
    for name, parameter in policy.named_parameters():
        first[name], shape = at, parameter.shape
        at += shape.numel()
        whole = torch.arange(first[name], at, dtype=torch.float32).view(shape)
        local = parameter.data.to_local()
        start = parameter.data.device_mesh.get_local_rank() * -(-shape[0] // parameter.data.device_mesh.size())
        local.copy_(whole[start : start + len(local)])
    assert at < 2**24
    return first


def look(kind: str, folder: Path, tp_size: int, world: World) -> dict:
    """What is known of one family's engine."""
    path = folder / kind
    if world.rank == 0:
        make_model(path, kind=kind, tied=kind == "llama")
    world.gather(None)
    cfg = RolloutConfig(
        tensor_model_parallel_size=tp_size, max_response_len=16, max_num_seqs=4, max_num_batched_tokens=2048,
        cpu_kv_cache_gib=0.1,
    )  # fmt: skip
    engine = RolloutEngine(
        cfg, str(path), dtype="float32", max_prompt_len=8, most_responses=4, stop_token_ids=[3], world=world, seed=5
    )
    engine.sleep()
    policy = load_policy(ModelConfig(dtype="float32"), str(path), FSDPConfig(), world)
    first = number(policy)
    weight_sync = WeightSync(policy, engine, fsdp=FSDPConfig())
    weight_sync.load()
    numbered = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    boxes = weight_sync.layout.boxes
    # What the numbers in the engine say against what the boxes say, of which only the sources' places are used.
    wrong = []
    for name, tensor in numbered.items():
        told = torch.full_like(tensor, -1)
        for box in boxes[name]:
            parameter = policy.get_parameter(box.source) if box.source else None
            ids = None if parameter is None else torch.arange(parameter.shape.numel()).float() + first[box.source]
            box.place(told).copy_(torch.zeros(box.shape) if ids is None else box.part(ids))
        if not torch.equal(told, tensor):
            wrong.append(name)
    known = {"tensors": len(numbered), "boxes": sum(map(len, boxes.values())), "wrong": wrong,
            "computed": sorted(weight_sync.layout.computed), "verified": weight_sync.verify()}  # fmt: skip
    return known | (look_at_a_loader_that_computes(engine, weight_sync) if kind == KINDS[-1] else {})


def look_at_a_loader_that_computes(engine: RolloutEngine, weight_sync: WeightSync) -> dict:
    """As Mamba's A = -exp(A_log): no copy can do what this loader does to one tensor."""
    load_weights, held = engine.load_weights, engine.parameters()
    engine.load_weights = lambda weights: load_weights((n, -w.exp() if n == NORM else w) for n, w in weights)
    parameter = weight_sync.policy.get_parameter(NORM)
    parameter.data.to_local().fill_(0.5)
    weight_sync.load()
    found = {"computed by a loader": sorted(weight_sync.layout.computed), "verified by loads": weight_sync.verify()}
    parameter.data.to_local().fill_(0.25)
    weight_sync.copy()
    found["computed anew"] = torch.equal(held[NORM], torch.full_like(held[NORM], 0.25).exp().neg())
    for name in (NORM, "lm_head.weight"):
        held[name].add_(1)
        try:
            weight_sync.verify()
        except WeightSyncError as error:
            found[f"{name} changed"] = str(error)
        weight_sync.copy()
    return found


def main(folder: str, out: str, tp_size: str) -> None:
    """Looks at every family, one engine after the other."""
    world = init_distributed()
    found = {kind: look(kind, Path(folder), int(tp_size), world) for kind in KINDS}
    if world.rank == 0:
        Path(out).write_text(json.dumps(found))
    shutdown_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])
