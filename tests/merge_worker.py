"""Under torchrun: sharded checkpoints as Lockstep or verl writes them, and what they must become when merged.

    torchrun --nproc_per_node=N -m tests.merge_worker lockstep|verl OUT MODEL...

Each MODEL is a Hugging Face folder; one named critic* becomes a critic. Writes for each OUT/MODEL/ as the checkpoint's
actor/ or critic/, and on rank 0 OUT/MODEL.safetensors: the gathered weights, and under "numbers" the log-probs or the
values of IDS.
"""

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lib.dist import init_distributed, shutdown_distributed
from lib.model.fsdp import FSDPConfig, iter_full_tensors, load_critic, load_policy, reshard
from lib.model.networks import CausalPolicy, ModelConfig

IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43]


def move_(model):
    """Another value for every weight, the same whatever the layout."""
    for place, parameter in enumerate(model.parameters()):
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        noise = 0.01 * torch.randn(full.shape, generator=torch.Generator().manual_seed(place))
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements)
            parameter.add_(noise)


@torch.no_grad()
def numbers_of(model):
    ids, positions = torch.tensor([IDS]), torch.arange(len(IDS))
    packed = (ids, positions[None], torch.tensor([0, len(IDS)], dtype=torch.int32), len(IDS))
    if isinstance(model, CausalPolicy):
        return model(*packed, positions[:-1], ids[0, 1:], 1.0, "none")[0]
    return model(*packed, positions).squeeze(-1)


def write_lockstep(folder, out, world):
    load = load_critic if folder.name.startswith("critic") else load_policy
    model = load(ModelConfig(dtype="float32"), str(folder), FSDPConfig(), world)
    move_(model)
    numbers = numbers_of(model)
    reshard(model)  # a forward pass leaves whole weights
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert all(isinstance(tensor, DTensor) for tensor in state.values())
    target = out / folder.name / "model"
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(target), save_distributed=True, thread_count=1))
    if world.rank == 0:
        shutil.copytree(folder, target.parent / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
        model.config.save_pretrained(target.parent / "huggingface")
    return dict(iter_full_tensors(model, torch.float32)), numbers


def write_verl(folder, out, world):
    """FSDP2 by transformers' own model: one mesh dimension, or from 4 ranks on replicas of shards."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float32)
    shape, names = ((world.size,), ("fsdp",)) if world.size < 4 else ((world.size // 2, 2), ("ddp", "fsdp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    move_(model)
    state = model.state_dict()
    state["model.rotary_emb.inv_freq"] = model.model.rotary_emb.inv_freq  # as older transformers saved it: replicated
    target = out / folder.name
    target.mkdir(parents=True, exist_ok=True)
    for kind, value in (("model", state), ("optim", {"state": {}}), ("extra_state", {"lr_scheduler": {}})):
        torch.save(value, target / f"{kind}_world_size_{world.size}_rank_{world.rank}.pt")
    if world.rank == 0:
        (target / "fsdp_config.json").write_text(f'{{"FSDP_version": 2, "world_size": {world.size}}}')
        shutil.copytree(folder, target / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    full = {name: tensor.full_tensor() for name, tensor in state.items() if isinstance(tensor, DTensor)}
    if getattr(config, "tie_word_embeddings", False):
        full.pop("lm_head.weight", None)
    return full, torch.zeros(0)


def main(kind, out, *folders):
    world = init_distributed()
    for folder in map(Path, folders):
        write = {"lockstep": write_lockstep, "verl": write_verl}[kind]
        full, numbers = write(folder, Path(out), world)
        if world.rank == 0:
            save_file({name: tensor.clone() for name, tensor in {**full, "numbers": numbers}.items()},
                      Path(out) / f"{folder.name}.safetensors")  # fmt: skip
    shutdown_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])
