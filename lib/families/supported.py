"""Which model families are known to work, and what a config.json says that none of the code here can train."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lib.errors import UserError

PROVED = {
    "Gemma3ForCausalLM": "gemma3_text",
    "Glm4ForCausalLM": "glm4",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}
"""Architecture -> its model_type, by which transformers chooses the code; tests train each of them
(tests/test_families.py). Others start with a warning and the proofs."""
CAUSAL, VALUES = "ForCausalLM", "ForTokenClassification"
KNOWN = ", ".join(name.removesuffix(CAUSAL) for name in PROVED)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SOFT_CAPS = ("final_logit_softcapping", "attn_logit_softcapping")
STATE_SPACE = ("mamba_", "ssm_", "linear_num_", "linear_conv_")
LATENT = ("kv_lora_rank", "q_lora_rank")  # DeepSeek's, whose engine keeps tensors that it makes of the weights
ATTENTION = {"full_attention", "sliding_attention"}
REMEDIES = {
    "dropout": "set them to 0",
    "windows that it says it does not use": "set use_sliding_window to true, or all of layer_types to full_attention",
}
"""For what config.json alone can mend."""
OTHER_INPUTS = ("vision_config", "audio_config", "text_config")


def is_proved(config: Mapping[str, Any]) -> bool:
    """Whether a config.json that passed `check_family` is of a family that tests train."""
    return config["architectures"][0].replace(VALUES, CAUSAL) in PROVED


def check_family(config: Mapping[str, Any], folder: Path, *, is_critic: bool = False) -> list[str]:
    """Warnings about a config.json's family. Raises UserError for what cannot be trained, by name.

    A critic may be a causal language model, or one for token classification with one label.
    """
    file = folder / "config.json"
    if config.get("quantization_config") is not None:
        raise UserError(
            f"the weights are quantised; {file}; found quantization_config, expected float weights; use the "
            "unquantised model: training needs its full precision"
        )
    found = config.get("architectures")
    endings = (CAUSAL, VALUES) if is_critic else (CAUSAL,)
    if not isinstance(found, list) or len(found) != 1 or not str(found[0]).endswith(endings):
        raise UserError(
            f"unsupported architecture; {file}; found {found}, expected a causal language model; use one of {KNOWN}"
        )
    if "auto_map" in config:  # as Phi-3's, although transformers has its own code; it does not take a null either
        remedy = "take that entry out" if is_proved(config) else f"use a model of {KNOWN}"
        raise UserError(
            f"the model brings its own code; {file}; found auto_map, expected an architecture of transformers itself; "
            f"{remedy}"
        )
    refuse_parts(config, file)
    causal = found[0].replace(VALUES, CAUSAL)
    if is_proved(config):
        _check_model_type(config, file, found[0], PROVED[causal])
        return []
    _check_model_type(config, file, found[0], _model_type(causal))
    return [
        f"{found[0]} is none of the families that are tested here ({KNOWN}): it trains if the proofs at the start pass"
    ]


def _check_model_type(config: Mapping[str, Any], file: Path, architecture: str, expected: str | None) -> None:
    if expected is None:
        raise UserError(
            f"unsupported architecture; {file}; found {architecture}, which this transformers does not know; use one "
            f"of {KNOWN}"
        )
    if config.get("model_type") != expected:
        raise UserError(
            f"architecture and model_type differ; {file}; found {architecture} and {config.get('model_type')!r}, "
            f"expected {expected!r}; download or copy the folder again"
        )


def _model_type(architecture: str) -> str | None:
    """The model_type of an architecture of transformers; None: of none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    return next((kind for kind, name in names if name == architecture), None)


def refuse_parts(config: Mapping[str, Any], file: Path) -> None:
    """Raises UserError for a config, as it stands or with its defaults, of a model that nothing here can train."""
    layer_types = config.get("layer_types") if isinstance(config.get("layer_types"), list) else []
    other_layers = sorted({str(kind) for kind in layer_types} - ATTENTION)
    # transformers' masks go by layer_types alone, its attention, and so ours, by both entries (SmolLM3).
    windows_off = "sliding_attention" in layer_types and not config.get("use_sliding_window", True)
    state_space = [name for name, value in config.items() if name.startswith(STATE_SPACE) and value]
    parts = {
        "other inputs than text": [name for name in OTHER_INPUTS if config.get(name)],
        "an encoder": ["is_encoder_decoder"] if config.get("is_encoder_decoder") else [],
        "experts": [name for name in EXPERTS if config.get(name)],
        "layers that are no attention over a sequence": other_layers or state_space,
        "latent attention (MLA)": [name for name in LATENT if config.get(name)],
        "soft-caps of logits": [name for name in SOFT_CAPS if config.get(name)],
        "dropout": [name for name, value in config.items() if _drops(config, name, value)],
        "windows that it says it does not use": ["layer_types", "use_sliding_window"] if windows_off else [],
        "attention to later tokens": [name for name in ("use_bidirectional_attention",) if config.get(name)],
    }
    for what, names in parts.items():
        if names:
            remedy = REMEDIES.get(what, f"use a dense decoder: {KNOWN}")
            raise UserError(
                f"the model has {what}, which is not supported; {file}; found {', '.join(names[:3])}; {remedy}"
            )


def refuse_tensors(names: Iterable[str], file: Path) -> None:
    """Raises UserError for a model whose weights, by their names, do what no entry of its config.json tells."""
    sinks = [name for name in names if name.rpartition(".")[2] == "sinks"]
    if sinks:
        raise UserError(
            f"the model has attention sinks, which are not supported; {file}; found {sinks[0]}; use a dense decoder: "
            f"{KNOWN}"
        )


def _drops(config: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether an entry makes the layers of a model that trains drop what the engine's do not."""
    if is_proved(config) and config["model_type"] != "phi3":  # their layers drop in attention alone, and ours has none
        return False
    elsewhere = ("attention_dropout", "attn_pdrop", "classifier_dropout")
    named = name.endswith(("dropout", "pdrop", "dropout_rate")) and name not in elsewhere
    return named and isinstance(value, int | float) and value > 0
