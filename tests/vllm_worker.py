"""A plain process with vLLM as anyone starts it on a folder: log-probs of given token ids, as JSON.

    python -m tests.vllm_worker FOLDER OUT ID...

Writes the log-prob of every id after the first one, given those before it.
"""

import json
import sys
from pathlib import Path

from lib.engine.in_process import set_engine_environment


def main(folder, out, *ids):
    set_engine_environment(on_gpu=False)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder, load_format="safetensors", dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=2,
        kv_cache_memory_bytes=2**24, logprobs_mode="raw_logprobs",
    )  # fmt: skip
    ids = list(map(int, ids))
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    [output] = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    found = [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
