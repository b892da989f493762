"""Models and checkpoints as files: what a folder must hold, proofs by hashes, shards put together, exports."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    checkpoint_folder="verify",
    model_folder="ModelFiles check_model_files",
    verl_shards="is_verl read_verl_shards",
    weights="open_weights",
    whole_tensors="read_shards write_safetensors",
)
