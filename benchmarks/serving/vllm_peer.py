"""vLLM as a peer of `benchmarks/serving_peers.py`: a process with a Python of its own.

    python benchmarks/serving/vllm_peer.py FOLDER THREADS

Each line of its input is JSON, {"prompts": [[token, ...], ...], "most": 64}; for each it writes a
line with the greedy tokens and the seconds of CPU that they took. The first line says its version.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    folder, threads = sys.argv[1:3]
    said = os.dup(1)  # vLLM writes to standard output, too
    os.dup2(2, 1)
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="WARNING",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS=threads,
    )
    import vllm

    model = vllm.LLM(
        model=folder,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=8,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    with os.fdopen(said, "w") as out:
        print(json.dumps({"vllm": vllm.__version__}), file=out, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            how = vllm.SamplingParams(
                temperature=0, max_tokens=asked["most"], ignore_eos=True, detokenize=False
            )
            prompts = [{"prompt_token_ids": one} for one in asked["prompts"]]
            start = time.process_time()
            found = model.generate(prompts, how, use_tqdm=False)
            spent = time.process_time() - start
            tokens = [list(one.outputs[0].token_ids) for one in found]
            print(json.dumps({"tokens": tokens, "cpu_seconds": spent}), file=out, flush=True)


if __name__ == "__main__":
    main()
