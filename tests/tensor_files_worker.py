"""Under torchrun: a policy's and a critic's tensors saved on some ranks, loaded on others.

    torchrun --nproc_per_node=N -m tests.tensor_files_worker MODEL FOLDER ACTION:NAME...

`save:2` trains on fixed gradients, writes FOLDER/2/{model,optim} and FOLDER/2/expected.pt (whole tensors). `load:2`
fills another policy with an optimizer that knows nothing, and writes FOLDER/2/found_N.pt: the same whole tensors, and
every class that was unpickled and every file that Python opened meanwhile. With `plain_save` and `plain_load` the
moments are each rank's own plain tensors, as HostAdamW's are.
"""

import pickle
import sys
from pathlib import Path

import torch

from lib.checkpoints.tensor_files import (
    load_model_,
    load_optimizer_,
    model_tensors,
    optimizer_tensors,
    own_pieces,
    write_pieces,
)
from lib.dist import init_distributed, shutdown_distributed
from lib.model.fsdp import FSDPConfig, full_tensor, load_critic
from lib.model.networks import ModelConfig
from lib.model.optim import OptimConfig, build_optimizer

UNTOUCHED = "score.bias"  # as in a policy's warm-up: a parameter that has no state yet


def build(path, world):
    model = load_critic(ModelConfig(dtype="float32"), path, FSDPConfig(), world)
    model.model.norm.weight.requires_grad_(False)
    return model, build_optimizer(model, OptimConfig(lr=1e-2))


def make_plain(model, optimizer):
    """State as a HostAdamW has it from the start: zeros in plain tensors, of this rank's shard."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            state = optimizer.state[parameter]
            state.setdefault("step", torch.zeros(()))
            for moment in ("exp_avg", "exp_avg_sq"):
                local = state[moment].to_local() if moment in state else torch.zeros_like(parameter.to_local())
                state[moment] = local.detach().clone()


def whole(model, optimizer):
    tensors = model_tensors(model) | optimizer_tensors(model, optimizer)
    return {name: full_tensor(tensor, torch.float32).clone() for name, tensor in tensors.items()}


def save(world, path, folder, plain):
    model, optimizer = build(path, world)
    for step in range(3):
        for place, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.requires_grad and name != UNTOUCHED:
                parameter.grad = parameter.detach() * (place + 1) + step
        optimizer.step()
    expected = whole(model, optimizer)
    if plain:
        make_plain(model, optimizer)
    tensors = {"model": model_tensors(model), "optim": optimizer_tensors(model, optimizer)}
    for kind, ours in tensors.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        write_pieces(folder / kind / f"shard-{world.rank}.safetensors", own_pieces(ours, world))
    if world.rank == 0:
        torch.save(expected, folder / "expected.pt")


def load(world, path, folder, plain, heard):
    model, optimizer = build(path, world)
    if plain:
        make_plain(model, optimizer)
    heard.clear()
    load_model_(folder / "model", model, world)
    load_optimizer_(folder / "optim", model, optimizer, world)
    during = list(heard)
    found = whole(model, optimizer)
    if world.rank == 0:
        torch.save({"tensors": found, "heard": during}, folder / f"found_{world.size}.pt")


def main(path, folder, *actions):
    world = init_distributed()
    heard = []

    def hook(event, arguments):
        is_ours = event == "open" and str(arguments[0]).startswith(folder)  # safetensors files open outside of Python
        if event == "pickle.find_class" or is_ours:
            heard.append((event, *map(str, arguments[:2])))

    sys.addaudithook(hook)
    pickle.loads(pickle.dumps(Path("x")))
    (Path(folder) / "heard").write_text("")
    assert {event for event, *_ in heard} == {"pickle.find_class", "open"}, "the audit hook does not work"
    for action in actions:
        name, _, where = action.partition(":")
        plain = name.startswith("plain_")
        if name.endswith("save"):
            save(world, path, Path(folder) / where, plain)
        else:
            load(world, path, Path(folder) / where, plain, heard)
        world.gather(None)
    shutdown_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])
