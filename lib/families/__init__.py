"""What differs between model families: which are known, what cannot be trained, what a head does to its logits."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    heads="check_head logits_divisor",
    meta_model="build_causal_lm build_decoder read_config",
    supported="PROVED check_family",
)
