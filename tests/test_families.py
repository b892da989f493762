"""Each family trains as transformers computes it and samples as it trains, from its folder to the merged file."""

import json
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
import transformers
from safetensors.torch import load_file

from lib.engine import in_process
from lib.engine.in_process import told_refusals
from lib.engine.rollout_config import RolloutConfig
from lib.errors import UserError
from lib.families.heads import check_head, logits_divisor
from lib.families.meta_model import build_causal_lm
from lib.families.supported import PROVED
from lib.model.networks import build_critic, build_policy, empty_
from lib.storage.model_folder import check_critic_files, check_model_files, check_parameters, check_reference
from merge import MergeConfig, merge
from tests.merge_checkpoints import seal, write_pieces
from tests.prefork import prefork
from tests.tiny import KINDS, make_model, make_tokenizer

RANKS = {"1 rank": 1, "tensor parallel 2": 2}


@pytest.fixture(scope="module", params=RANKS)
def found(request, tmp_path_factory):
    """(folder, number of ranks, {family: what the worker found})."""
    folder, num_ranks = tmp_path_factory.mktemp("families"), RANKS[request.param]
    words = (str(folder), str(folder / "found.json"), str(num_ranks), *KINDS)
    done = prefork(num_ranks, "-m", "tests.families_worker", *words, vllm=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder, num_ranks, json.loads((folder / "found.json").read_text())


def test_the_families_of_the_tests_are_those_that_count_as_proved():
    configs = {
        getattr(transformers, f"{name.removesuffix('ForCausalLM')}{middle}Config", None)
        for name in PROVED
        for middle in ("", "Text")
    }
    assert {config.model_type for config in configs if config} >= set(PROVED.values())
    assert {name.removesuffix("ForCausalLM").lower() for name in PROVED} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_and_engine_compute_what_transformers_computes(found, kind):
    _, _, results = found
    values = results[kind]
    assert values["bits"] > 10 and values["computed"] == [] and values["tokens"] > 60
    assert values["packed"] < 1e-5, values
    assert values["gradients"] < 1e-5, values
    assert values["engine"] < 1e-4, values
    assert values["first"] > 0.1 and values["leak"] == 0  # another sequence's tokens change nothing


@pytest.mark.parametrize("kind", KINDS)
def test_the_proof_of_the_start_finds_an_error_in_any_familys_engine(found, kind):
    _, _, results = found
    assert results[kind]["function"] < 1e-5
    for name, said in results[kind]["planted"].items():
        assert str(said).startswith("engine and trainer hold the same weights and do not compute the same"), name


def test_a_window_that_only_the_engine_obeys_is_found_without_a_sequence_beyond_it(found):
    _, _, results = found
    assert (
        "layer 0" in results["stray window"]
        and "found none in the trainer and 4 in the engine" in results["stray window"]
    )


def test_a_family_that_the_engine_does_not_serve_is_told_by_its_name(found):
    line = found[2]["started"]["DiffLlama"]
    assert line.startswith("the engine does not start with this model; DiffLlamaForCausalLM in ")
    assert "found ValueError: Layer 0 does not dispatch" in line and "use one of Gemma3, Glm4" in line


def test_what_only_the_engines_first_step_finds_is_told_in_a_line(found):
    line = found[2]["started"]["Llama"]
    assert line.startswith("the engine does not start with these settings; rank 0; found RuntimeError: "), line
    assert "head_dim=16" in line and line.endswith("; change what it names (its own flags are not ours)"), line


def test_a_config_class_that_the_engine_brings_does_not_become_the_trainers(found):
    assert found[2]["started"]["HyperCLOVAX"] == "nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_saved_and_merged_is_the_file_bit_for_bit(found, kind, tmp_path):
    folder, num_ranks, _ = found
    step = seal(tmp_path / "run", {"actor": folder / f"checkpoint{num_ranks}" / kind})
    merge(MergeConfig(local_dir=str(step / "actor"), target_dir=str(tmp_path / "merged"), dtype="keep"))
    ours, theirs = (load_file(p / "model.safetensors") for p in (tmp_path / "merged", folder / f"{kind}{num_ranks}"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", ["gemma3", "granite", "olmo2", "olmo3", "llama"])
def test_a_critic_of_any_family_is_merged_to_a_folder_that_a_critic_starts_from(tmp_path, kind):
    make_tokenizer(make_model(tmp_path / "policy", kind=kind))
    critic = build_critic(str(tmp_path / "policy"), param_dtype=torch.float32)
    critic.config.save_pretrained(tmp_path / "critic" / "huggingface")
    weights = {name: torch.randn(parameter.shape) for name, parameter in critic.named_parameters()}
    pieces = {name: ([0] * tensor.ndim, tensor) for name, tensor in weights.items()}
    write_pieces(tmp_path / "critic" / "model", {1: pieces})
    step = seal(tmp_path / "run", {"critic": tmp_path / "critic"})
    merge(MergeConfig(local_dir=str(step / "critic"), target_dir=str(tmp_path / "merged"), dtype="keep"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == weights.keys() and all(torch.equal(merged[name], weights[name]) for name in weights)
    policy = check_model_files(str(tmp_path / "policy"), max_prompt_len=8, max_response_len=8)
    files = check_critic_files(str(tmp_path / "merged"), policy, max_prompt_len=8, max_response_len=8)
    assert files.shapes == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    again = build_critic(str(tmp_path / "merged"), param_dtype=torch.float32)
    assert again.config.architectures == critic.config.architectures


# ---- Heads ----


def head_of(path, kind):
    return build_causal_lm(make_model(path, kind=kind, tied=False))


def test_a_head_that_scales_is_known_and_one_that_does_more_is_refused(tmp_path, monkeypatch):
    for kind in ("qwen3", "granite"):
        check_head(head_of(tmp_path / kind, kind))
    granite = head_of(tmp_path / "granite", "granite")
    assert logits_divisor(granite.config.to_dict()) == 6
    assert logits_divisor({"logit_scale": 0.25, "lm_head_multiplier": None}) == 4
    monkeypatch.setattr("lib.families.heads.DIVISORS", ())
    with pytest.raises(UserError, match="more than a product and a scale; GraniteForCausalLM"):
        check_head(granite)
    capped = head_of(tmp_path / "qwen3", "qwen3")
    capped.__class__ = Capped
    with pytest.raises(UserError, match="more than a product and a scale; Capped"):
        check_head(capped)


@pytest.mark.parametrize("value", ["x", 0, float("nan"), True])
def test_a_scale_of_the_head_is_a_finite_number_other_than_0(value):
    with pytest.raises(UserError, match=f"no usable logit_scale; a cohere model; found {value!r}, expected a finite"):
        logits_divisor({"model_type": "cohere", "logit_scale": value})


class Capped(transformers.Qwen3ForCausalLM):
    def forward(self, **keywords):
        output = super().forward(**keywords)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output


def test_outputs_are_read_by_name_where_a_config_asks_for_tuples(tmp_path):
    config = json.loads((make_model(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"return_dict": False}))
    check_head(build_causal_lm(tmp_path))
    policy, ids = build_policy(str(tmp_path), param_dtype=torch.float32), torch.tensor([[3, 4, 5]])
    empty_(policy, torch.device("cpu"))
    log_probs, _ = policy(ids, torch.arange(3)[None], torch.tensor([0, 3], dtype=torch.int32), 3, torch.tensor([1]),
                          ids[0, 2:], 1.0, "none")  # fmt: skip
    assert log_probs.shape == (1,)


# ---- What is not proved, and what cannot be ----


def test_a_family_that_is_not_listed_starts_with_a_warning(tmp_path):
    config = transformers.OlmoConfig(
        vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    files = check_model_files(str(tmp_path), max_prompt_len=8, max_response_len=8)
    assert files.warnings[0].startswith("OlmoForCausalLM is none of the families that are tested here (Gemma3, Glm4")


def test_attention_sinks_are_refused_by_the_name_of_their_weights(tmp_path):
    config = transformers.GraniteSWAConfig(
        vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    files = check_model_files(str(tmp_path), max_prompt_len=8, max_response_len=8)
    with pytest.raises(UserError, match=r"attention sinks.*found model\.layers\.0\.self_attn\.sinks; use a dense"):
        check_parameters(files)


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_windows_that_a_config_names_and_turns_off_are_refused_for_every_role(tmp_path, role):
    make_tokenizer(make_model(tmp_path / "smollm3", kind="smollm3"))
    file = tmp_path / "smollm3" / "config.json"
    changes = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "use_sliding_window"}
    policy = check_model_files(str(file.parent), max_prompt_len=8, max_response_len=8)
    file.write_text(json.dumps(config | changes))  # transformers' default is false
    with pytest.raises(UserError, match=r"windows that it says it does not use.*layer_types, use_sliding_window; set"):
        if role == "critic":
            check_critic_files(str(file.parent), policy, max_prompt_len=8, max_response_len=8)
        else:
            check_parameters(check_model_files(str(file.parent), max_prompt_len=8, max_response_len=8))
    file.write_text(json.dumps(config | changes | {"use_sliding_window": True}))  # as the remedy says
    check_parameters(check_model_files(str(file.parent), max_prompt_len=8, max_response_len=8))


VLLM, OURS = find_spec("vllm").origin, __file__
COLLECTIVE = torch.distributed.distributed_c10d.__file__


@pytest.mark.parametrize(
    ("architecture", "error", "files", "said"),
    [
        ("Qwen3", ValueError("no memory"), [OURS], "with these .*; rank 1; found ValueError: no memory; change --"),
        ("Qwen3", ValueError("no gelu"), [VLLM], "with these .* ValueError: no gelu; change what it names"),
        ("Qwen3", AssertionError("no window"), [VLLM], "with these .* AssertionError: no window; change what"),
        ("Qwen3", RuntimeError("no kernel"), [VLLM, torch._ops.__file__], "with these .* RuntimeError: no kernel; "),
        ("Qwen3", NotImplementedError("no"), [VLLM], "with these settings; .* NotImplementedError: no; "),
        ("Qwen3", RuntimeError("a bug"), [OURS], None),
        ("Qwen3", AssertionError("a bug"), [VLLM, in_process.__file__], None),
        ("Qwen3", TypeError("a bug"), [VLLM], None),
        ("Qwen3", RuntimeError("a peer is gone"), [VLLM, COLLECTIVE], None),
        ("Qwen3", torch.OutOfMemoryError("CUDA out of memory"), [VLLM], None),
        ("Olmo", RuntimeError("no kernel"), [OURS], "with this model; OlmoForCausalLM in .* RuntimeError: no kernel; "),
        ("Olmo", UserError("ours"), [OURS], None),
    ],
)
def test_what_an_engine_says_as_it_starts_is_told_unless_it_is_a_bug(tmp_path, architecture, error, files, said):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [f"{architecture}ForCausalLM"]}))
    telling = told_refusals(RolloutConfig(), str(tmp_path), on_gpu=False, rank=1)
    match = said and f"the engine does not start {said}"
    with pytest.raises(UserError if said else type(error), match=match) as caught, telling:
        raise_from(files, error)
    assert said or caught.value is error


def raise_from(files, error):
    """Raises it in the last of these files, called from the others."""
    inner = (lambda: raise_from(files[1:], error)) if len(files) > 1 else None
    source = "inner()" if inner else "raise error"
    exec(compile(source, files[0], "exec"), {"inner": inner, "error": error})


LONG = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
ORIGINAL = {"original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "longrope", **LONG, **ORIGINAL}},
        {"rope_scaling": {"type": "longrope", **LONG}, **ORIGINAL},  # as Phi-3 and Phi-4-mini have it
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **ORIGINAL}},
        {"rope_parameters": {"full_attention": {"rope_type": "longrope", **LONG, **ORIGINAL}}},
    ],
)
def test_rotary_tables_that_change_with_the_longest_sequence_bound_the_lengths(tmp_path, changes):
    make_tokenizer(make_model(tmp_path, tied=False))
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    check_model_files(str(tmp_path), max_prompt_len=32, max_response_len=32)
    with pytest.raises(UserError, match=r"32 [+] .* 33 = 65, expected at most original_max_position_embeddings=64"):
        check_model_files(str(tmp_path), max_prompt_len=32, max_response_len=33)


def test_a_critic_or_reference_that_the_proofs_of_the_policy_say_nothing_about_is_refused(tmp_path):
    files = {}
    for name, config in (("olmo", transformers.OlmoConfig), ("starcoder2", transformers.Starcoder2Config)):
        words = dict(
            vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        transformers.AutoModelForCausalLM.from_config(config(**words)).save_pretrained(tmp_path / name)
        make_tokenizer(tmp_path / name)
        files[name] = check_model_files(str(tmp_path / name), max_prompt_len=8, max_response_len=8)
    make_tokenizer(make_model(tmp_path / "qwen3", tied=False))
    files["qwen3"] = check_model_files(str(tmp_path / "qwen3"), max_prompt_len=8, max_response_len=8)
    for policy, other, refused in (
        ("olmo", "olmo", False), ("olmo", "qwen3", False), ("olmo", "starcoder2", True), ("qwen3", "olmo", True),
    ):  # fmt: skip
        with pytest.raises(UserError, match="nothing proves right as the reference") if refused else nullcontext():
            check_reference(files[policy], files[other])
        with pytest.raises(UserError, match="nothing proves right as the critic") if refused else nullcontext():
            check_critic_files(str(tmp_path / other), files[policy], max_prompt_len=8, max_response_len=8)


@pytest.mark.parametrize(("kind", "where"), [("StableLm", "cu_seq_lens_q"), ("Nemotron", "cu_seq_lens_q")])
def test_layers_that_hand_no_borders_on_are_told_apart_by_the_first_pass(tmp_path, kind, where):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = build_policy(str(tmp_path), param_dtype=torch.float32)
    empty_(policy, torch.device("cpu"))
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(UserError, match=where):
        policy(ids, torch.arange(3)[None], torch.tensor([0, 3], dtype=torch.int32), 3, torch.tensor([1]), ids[0, 2:],
               1.0, "none")  # fmt: skip
