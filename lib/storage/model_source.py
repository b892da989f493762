"""A model that lies in a run: the policy of its newest whole checkpoint, or of the named one, found and proved."""

from pathlib import Path

from lib.config.values import resolve_path
from lib.dist import World
from lib.errors import DamagedCheckpoint, UserError
from lib.storage.adapter import ADAPTER_FILE, check_base, read_adapter
from lib.storage.checkpoint_folder import check, find_checkpoints, share, verify
from lib.storage.weight_headers import shards_beside
from lib.storage.weights import hash_tensors, open_weights

NEEDED = ("actor/model/", "actor/huggingface/")
"""How the names of a checkpoint's files begin that a policy is made of."""


def find_actor(path: str, option: str) -> tuple[Path | None, list[str]]:
    """The `actor` folder of a checkpoint, and warnings; None for what is no checkpoint, nor a run, nor part of one."""
    folder = resolve_path(path, option)
    if not path.strip() or not folder.is_dir():
        return None, []
    if (folder / "huggingface").is_dir() and (folder / "model").is_dir():
        return folder, []
    if shards_beside(folder) is not None:
        return folder.parent, []
    if (folder / "actor").is_dir():
        return folder / "actor", []
    found = find_checkpoints(folder, below=NEEDED)
    whole = next((checkpoint for checkpoint in found if checkpoint.problem is None), None)
    if whole is not None:
        skipped = found[: found.index(whole)]
        return whole.path / "actor", [f"skipped: {checkpoint.problem}" for checkpoint in skipped]
    if found:
        raise DamagedCheckpoint(found[0].problem)
    if (folder / "status.json").is_file():
        raise UserError(
            f"the run has no checkpoint; {option} {path}; found a run's status.json and no global_step_N, expected "
            "at least 1; let it train up to one, or give another model"
        )
    return None, []


def verify_actor(actor: Path, world: World) -> dict[str, str]:
    """{file: hash} of the policy's weights and config, with which every byte was compared; under an adapter also the
    model that it was trained on.

    Raises DamagedCheckpoint, UserError for another model. Executed by all ranks together, which share the hashing.
    """

    def run() -> dict[str, str]:
        manifest = check(actor.parent, below=NEEDED)
        wanted = {name: entry for name, entry in manifest.files.items() if name.startswith(NEEDED)}
        verify(actor.parent, share(wanted, world.rank, world.size), below=NEEDED)
        is_ours = {
            name for name in wanted if name.startswith("actor/model/") or name.endswith(("/config.json", ADAPTER_FILE))
        }
        return {name: wanted[name].hash for name in is_ours}

    hashes = world.agree(run)
    adapter = world.agree(lambda: read_adapter(actor / "huggingface"))
    if adapter is not None:
        world.agree(lambda: open_weights(actor / "huggingface"))  # refuses a base that is gone
        here = hash_tensors(Path(adapter.base), world)
        world.agree(lambda: check_base(adapter.tensors, here, adapter.base))
    return hashes
