"""Every fault of a model folder has its own message; a folder that transformers wrote passes."""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model_folders import (
    CONFIG,
    TOKENIZER,
    check,
    expected_shapes,
    message,
    safetensors,
    with_tensors,
    write,
    write_folder,
)
from tests.ranks import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def shard(folder: Path, *, weight_map: dict | None = None) -> None:
    """Splits model.safetensors into two shards with an index."""
    shapes = expected_shapes(CONFIG)
    names = list(shapes)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in parts.items():
        (folder / file).write_bytes(safetensors({name: shapes[name] for name in part}))
    own = {name: file for file, part in parts.items() for name in part}
    write(folder / "model.safetensors.index.json", {"weight_map": own | (weight_map or {})})
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_shapes_and_parameter_count_are_those_of_transformers(architecture: str, tied: bool, tmp_path: Path) -> None:
    import transformers

    config_class = getattr(transformers, architecture.removesuffix("ForCausalLM") + "Config")
    sizes = {
        k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type", "tie_word_embeddings", "head_dim")
    }
    biases = {"attention_bias": True, "mlp_bias": True} if architecture == "LlamaForCausalLM" else {}
    model = transformers.AutoModelForCausalLM.from_config(config_class(**sizes, **biases, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    write(tmp_path / "tokenizer.json", TOKENIZER)
    write(tmp_path / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    files = check(tmp_path)
    assert files.num_parameters == model.num_parameters()
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert files.shapes == theirs


def test_a_sound_folder_passes_whole_or_in_shards(folder: Path) -> None:
    embedding, norm = 32 * 16, 16
    attention = 16 * 32 + 2 * 16 * 16 + 32 * 16 + 2 * 8  # q, k and v, o, the two head norms
    layer = attention + 3 * 16 * 24 + 2 * 16
    assert check(folder).num_parameters == embedding + norm + 2 * layer
    shard(folder)
    assert check(folder).folder == folder


def test_odd_but_sound_paths_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = folder.parent / "a b" / "modèle"
    odd.parent.mkdir()
    shutil.copytree(folder, odd)
    check(odd)
    check(f"{odd}/../../model/")
    monkeypatch.setenv("HOME", str(folder.parent))
    check("~/model")


def test_a_missing_path_names_the_nearest_sibling(folder: Path) -> None:
    assert f"did you mean {folder}" in message(folder.parent / "modle")
    assert "--model.path" in message("")
    assert "not a folder" in message(folder / "config.json")
    assert "cannot be opened" in message("x" * 5000)


def test_a_hub_id_that_cannot_be_had_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert "some-org/some-model" in message("some-org/some-model")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ("GPT2LMHeadModel", "Llama", "Qwen3")),
        ({"architectures": ["NoSuchForCausalLM"]}, ("NoSuchForCausalLM", "does not know")),
        ({"num_local_experts": 8}, ("experts", "num_local_experts", "dense decoder")),
        ({"layer_types": ["linear_attention", "full_attention"]}, ("no attention", "linear_attention")),
        ({"mamba_d_state": 16}, ("no attention", "mamba_d_state")),
        ({"kv_lora_rank": 512}, ("latent attention (MLA)", "kv_lora_rank", "dense decoder")),
        ({"final_logit_softcapping": 30.0}, ("soft-caps", "final_logit_softcapping")),
        ({"vision_config": {"depth": 2}}, ("other inputs", "vision_config")),
        ({"is_encoder_decoder": True}, ("encoder",)),
        ({"use_bidirectional_attention": True}, ("later tokens",)),
        (
            {"resid_pdrop": 0.1, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
            ("dropout", "resid_pdrop", "set them to 0"),
        ),
        ({"architectures": None}, ("architecture",)),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantised", "quantization_config")),
        ({"auto_map": {"AutoModel": "x.Y"}, "architectures": ["OwnForCausalLM"]}, ("auto_map", "use a model of")),
        ({"auto_map": {"AutoModel": "x.Y"}}, ("auto_map", "take that entry out")),
        ({"hidden_size": "16"}, ("hidden_size", "'16'")),
        ({"vocab_size": 0}, ("vocab_size", "0")),
        ({"num_key_value_heads": -2}, ("num_key_value_heads", "-2")),
        ({"sliding_window": -1}, ("no usable sliding_window", "found -1", "say null for none")),
        ({"sliding_window": True}, ("no usable sliding_window", "found True")),
        ({"num_key_value_heads": 3}, ("num_attention_heads=4", "num_key_value_heads=3")),
        ({"vocab_size": 48}, ("embed_tokens", "[32, 16]", "[48, 16]")),
        ({"intermediate_size": 23}, ("gate_proj", "[24, 16]", "[23, 16]")),
        ({"num_hidden_layers": 3}, ("lack tensors", "model.layers.2.")),
        ({"num_hidden_layers": 1}, ("no place for", "model.layers.1.")),
        ({"tie_word_embeddings": False}, ("lm_head.weight",)),
        ({"num_hidden_layers": 10**12}, ("num_hidden_layers", "1000")),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, ("no place for", "q_norm")),
        ({"architectures": ["LlamaForCausalLM"]}, ("LlamaForCausalLM", "'qwen3'", "'llama'")),
        ({"model_type": None}, ("model_type", "None", "'qwen3'")),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, ("rope scaling", "'4'")),
    ],
)
def test_a_config_that_does_not_fit_names_the_field(folder: Path, changes: dict, expected: tuple[str, ...]) -> None:
    write(folder / "config.json", CONFIG | changes)
    text = message(folder)
    assert all(part in text for part in expected), text


@pytest.mark.parametrize("entry", ["quantization_config", "sliding_window"])
def test_an_entry_that_says_null_is_as_one_that_is_not_there(folder: Path, entry: str) -> None:
    write(folder / "config.json", CONFIG | {entry: None})
    check(folder)


def test_a_config_file_that_cannot_be_read_names_file_and_line(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text('{\n  "vocab_size": 32,\n  oops\n}')
    assert "config.json, line 3" in message(folder)
    config.write_text("[1]")
    assert "list" in message(folder)
    config.write_bytes(b'{"a": "\xff"}')
    assert "UTF-8" in message(folder)
    config.write_text("")
    assert "line 1" in message(folder)
    config.write_text('{"a":' * 200_000)
    assert "recursion" in message(folder)
    config.write_text('{"a": ' + "9" * 5000 + "}")
    assert "digits" in message(folder)
    config.unlink()
    assert "no config.json" in message(folder)
    write(folder / "adapter_config.json", {"base_model_name_or_path": "Qwen/Qwen3-0.6B"})
    assert "adapter of Qwen/Qwen3-0.6B" in message(folder)


def test_a_folder_above_the_model_points_into_it(folder: Path) -> None:
    assert f"use {folder}" in message(folder.parent)


def test_lengths_beyond_the_models_positions_print_three_numbers(folder: Path) -> None:
    check(folder, max_prompt_len=32, max_response_len=32)
    text = message(folder, max_prompt_len=40, max_response_len=25)
    assert "40" in text and "25" in text and "= 65" in text and "64" in text
    write(folder / "config.json", CONFIG | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    check(folder, max_prompt_len=64, max_response_len=64)


def test_a_tensor_parallel_size_must_divide_the_heads(folder: Path) -> None:
    for size in (1, 2, 4):
        check(folder, tensor_parallel_size=size)
    assert "use 1, 2 or 4" in message(folder, tensor_parallel_size=3)


def test_a_tensor_parallel_size_must_divide_the_layers_between_the_attentions(folder: Path) -> None:
    write(folder / "config.json", CONFIG | {"intermediate_size": 22})
    (folder / "model.safetensors").write_bytes(safetensors(expected_shapes(CONFIG | {"intermediate_size": 22})))
    check(folder, tensor_parallel_size=2)
    text = message(folder, tensor_parallel_size=4)
    assert "2 key-value heads and intermediate_size=22; use 1 or 2" in text, text


def test_missing_or_foreign_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no weights" in message(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "pickled" in message(folder) and "save_pretrained" in message(folder)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"x")
    assert "no index" in message(folder)


def test_a_weight_file_that_is_not_whole_prints_its_sizes(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert (
        "truncated" in message(folder) and str(len(whole) - 1) in message(folder) and str(len(whole)) in message(folder)
    )
    file.write_bytes(whole + b"x")
    assert "followed by bytes" in message(folder)
    file.write_bytes(whole[:100])
    assert "not a whole safetensors file" in message(folder)
    file.write_bytes(b"")
    assert "0 bytes" in message(folder)
    file.write_bytes(b"<html>not found</html>")
    assert "not a whole safetensors file" in message(folder)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in message(folder)
    file.write_bytes(struct.pack("<Q", 4) + b"oops")
    assert "damaged safetensors header" in message(folder)
    for header in (b'{"a":' * 200_000, b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}'):
        file.write_bytes(struct.pack("<Q", len(header)) + header)
        assert "damaged safetensors header" in message(folder)
    file.write_bytes(safetensors(expected_shapes(CONFIG), dtype="F16"))  # two bytes a value where the header says four
    assert "damaged safetensors header" in message(folder)
    overlap = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "ab"}).encode()
    file.write_bytes(struct.pack("<Q", len(overlap)) + overlap + bytes(8))
    assert "damaged safetensors header" in message(folder)
    file.write_bytes(safetensors(expected_shapes(CONFIG), dtype="I8", width=1))
    assert "quantised" in message(folder) and "I8" in message(folder)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused_and_an_equal_one_accepted(
    folder: Path,
) -> None:
    head = {"lm_head.weight": (32, 16)}
    with_tensors(folder, head, embedding=0.5, head=0.25)
    text = message(folder)
    assert "lm_head.weight and model.embed_tokens.weight" in text and "set tie_word_embeddings to false" in text
    with_tensors(folder, head, config=CONFIG | {"tie_word_embeddings": False}, embedding=0.5, head=0.25)
    check(folder)  # as the remedy says
    with_tensors(folder, head, embedding=0.5, head=0.5)
    check(folder)
    with_tensors(folder, {"lm_head.weight": (32, 15)}, embedding=0.5, head=0.5)
    assert "tied" in message(folder)


def test_a_head_that_is_the_embedding_in_another_precision_is_told_as_that(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    head = weights["model.embed_tokens.weight"].to(torch.bfloat16)
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors")
    assert "found BF16 and F32, expected the same; save the model without lm_head.weight" in message(folder)


@pytest.mark.parametrize("name", ["v_head.summary.weight", "model.embed_tokens.lora_A", "lm_head.bias", "x"])
def test_a_tensor_that_would_not_be_trained_is_refused_wherever_it_is(folder: Path, name: str) -> None:
    with_tensors(folder, {name: (2, 2)})
    text = message(folder)
    assert "no place for" in text and f"found {name}" in text, text


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"])
def test_a_rotary_table_which_every_model_computes_is_harmless(folder: Path, name: str) -> None:
    with_tensors(folder, {name: (4,)})
    check(folder)


def test_an_index_may_only_name_existing_shards_inside_the_folder(folder: Path) -> None:
    shard(folder, weight_map={"model.norm.weight": "../model/model-1.safetensors"})
    assert "outside the model folder" in message(folder)
    shard_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    write(folder / "model.safetensors.index.json", {"weight_map": shard_map | {"model.norm.weight": "/etc/passwd"}})
    assert "outside the model folder" in message(folder)
    write(
        folder / "model.safetensors.index.json", {"weight_map": shard_map | {"model.norm.weight": "gone.safetensors"}}
    )
    assert "gone.safetensors" in message(folder)
    write(
        folder / "model.safetensors.index.json",
        {"weight_map": shard_map | {"model.norm.weight": "model-1.safetensors"}},
    )
    assert "shard lacks tensors" in message(folder) and "model.norm.weight" in message(folder)
    shutil.copy(folder / "model-2.safetensors", folder / "model-3.safetensors")
    shard_map |= {
        "model.norm.weight": "model-2.safetensors",
        "model.layers.1.self_attn.q_norm.weight": "model-3.safetensors",
    }
    write(folder / "model.safetensors.index.json", {"weight_map": shard_map})
    assert "in two weight files" in message(folder)


def test_a_missing_or_unfitting_tokenizer_is_refused(folder: Path) -> None:
    tokenizer = folder / "tokenizer.json"
    write(tokenizer, TOKENIZER | {"added_tokens": [{"id": 31}]})
    check(folder)
    write(tokenizer, TOKENIZER | {"added_tokens": [{"id": 32}]})
    assert "33 tokens" in message(folder) and "vocab_size=32" in message(folder)
    write(tokenizer, {"model": {"vocab": [["a", 0.0]] * 40}})
    assert "40 tokens" in message(folder)
    write(tokenizer, {"model": {}})
    assert "damaged tokenizer" in message(folder)
    tokenizer.unlink()
    assert "no tokenizer" in message(folder)
    write(folder / "vocab.json", {"a": 0})
    (folder / "merges.txt").write_text("")
    check(folder)


def test_a_folder_without_a_tokenizer_configuration_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    assert "expected tokenizer_config.json" in message(folder)
    (folder / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json, line 1" in message(folder)


def test_what_comes_before_transformers_is_imported_imports_not_even_torch(folder: Path) -> None:
    code = (
        "import sys; from lib.storage.model_folder import check_model_files as c; "
        f"c({str(folder)!r}, max_prompt_len=8, "
        "max_response_len=8); sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


READ = """
import gc, sys
from pathlib import Path
import torch
from lib.storage.weight_headers import Entry, _are_equal, read_safetensors_header
from lib.storage.weights import open_weights
folder = Path(sys.argv[1])

def peak(read):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = rss("VmRSS")
    read()
    return rss("VmHWM") - before

def rss(name):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return 1024 * int(line.split()[1])

def one_by_one():
    weights = open_weights(folder)
    for name in weights.files:
        assert float(weights.read(name).min()) == 1  # touches every page

def compare():
    one, other = (read_safetensors_header(folder / f"model-{i}.safetensors")[f"{i}.0"] for i in (1, 2))
    assert _are_equal(one, other)

print(peak(one_by_one), peak(compare))
"""


def test_two_weight_files_are_read_and_compared_in_the_memory_of_one_tensor(tmp_path):
    import torch
    from safetensors.torch import save_file

    size, names = 2**24, {i: [f"{i}.{part}" for part in range(3)] for i in (1, 2)}
    for i in names:  # 3 tensors of 64 MiB each
        save_file({name: torch.ones(2**12, size // 2**12) for name in names[i]}, tmp_path / f"model-{i}.safetensors")
    index = {"weight_map": {name: f"model-{i}.safetensors" for i in names for name in names[i]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    done = subprocess.run([sys.executable, "-c", READ, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one_by_one, compared = map(int, done.stdout.split())
    assert one_by_one < 2.5 * 4 * size  # the tensor that was read, and its pages of the file
    assert compared < 0.75 * 4 * size  # two chunks
