#!/usr/bin/env bash
# Measures servers of one model one after the other, and puts their tables side by side.
#
#   docs/benchmarks/serving.sh MODEL_FOLDER RESULTS_FOLDER [SERVER...]
#
# A SERVER is `this` (vllm-mlx serve), `mlx-lm` (mlx_lm.server) or `existing` (the vllm-mlx of the
# package index, in an environment of its own whose folder EXISTING names); the default is
# `this mlx-lm`. Everything has to be on the PATH. Nothing else should run on the machine.
set -euo pipefail

model=${1:?give the folder of a model}
results=${2:?give a folder for the results}
shift 2
servers=("$@")
(($#)) || servers=(this mlx-lm)

port=${PORT:-18080}
url=http://127.0.0.1:$port
concurrency=${CONCURRENCY:-1,4,16}
repetitions=${REPETITIONS:-3}
prompt_tokens=${PROMPT_TOKENS:-512}
shared_tokens=${SHARED_TOKENS:-384}
output_tokens=${OUTPUT_TOKENS:-64}
requests=${REQUESTS:-16}
long_prompt_tokens=${LONG_PROMPT_TOKENS:-3400}
stream_tokens=${STREAM_TOKENS:-400}
# How long after the stream's command the long prompt's is started.
stream_lead_s=${STREAM_LEAD:-2}
wait_s=${WAIT:-600}
# MLX's own BLAS on a Linux CPU is some twenty times slower; this server loads OpenBLAS itself.
openblas=${OPENBLAS-/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0}

mkdir -p "$results"
# Made here, so that no server has to be asked for a length while it streams: nearly every word is
# one token.
python3 - "$long_prompt_tokens" "$results" <<'PYTHON'
import pathlib
import random
import sys

words = "the of and to in that it was for on are with as they at be this from have by one had not"
num_words, folder = int(sys.argv[1]) - 40, pathlib.Path(sys.argv[2])
text = " ".join(random.Random(0).choices(words.split(), k=num_words))
(folder / "long.txt").write_text(text + "\n")
(folder / "counting.txt").write_text("Count from 1 to 1000, one number a line.\n")
PYTHON

pid=
stop_server() {
    [[ -z $pid ]] || { kill "$pid" 2>/dev/null || true; wait "$pid" 2>/dev/null || true; }
    pid=
}
trap stop_server EXIT

# start SERVER: leaves its process id in `pid` and the name to ask for in `name`.
start() {
    local log=$results/$1.log
    case $1 in
    this)
        vllm-mlx serve "$model" --port "$port" --dtype float32 >"$log" 2>&1 &
        name=$model
        ;;
    mlx-lm)
        LD_PRELOAD=$openblas mlx_lm.server --model "$model" --port "$port" >"$log" 2>&1 &
        name=default_model
        ;;
    existing)
        LD_PRELOAD=$openblas "${EXISTING:?name its environment}/bin/vllm-mlx" serve "$model" \
            --port "$port" --continuous-batching >"$log" 2>&1 &
        name=$model
        ;;
    *)
        echo "there is no server '$1'" >&2
        exit 2
        ;;
    esac
    pid=$!
}

bench() {
    vllm-mlx bench-serve --url "$url" --model "$name" --wait "$wait_s" --request-timeout 1200 "$@"
}

for server in "${servers[@]}"; do
    echo "== $server"
    start "$server"
    bench --tag "$server" --concurrency "$concurrency" --repetitions "$repetitions" \
        --prompt-tokens "$prompt_tokens" --shared-prefix-tokens "$shared_tokens" \
        --output-tokens "$output_tokens" --num-requests "$requests" \
        --cache-mode cold,prefix-hit --raw -o "$results/$server.json"

    # A stream, and a long prompt that arrives once it runs: its longest gap is the stall.
    alone=(--tag "$server" --concurrency 1 --num-requests 1 --repetitions 1 --warmup 0
        --cache-mode cold)
    bench "${alone[@]}" --prompts "$results/counting.txt" --output-tokens "$stream_tokens" \
        -o "$results/$server-stream.json" &
    stream=$!
    sleep "$stream_lead_s"
    bench "${alone[@]}" --prompts "$results/long.txt" --output-tokens 1 \
        -o "$results/$server-long.json"
    wait "$stream"
    stop_server
done

echo "== side by side"
files=("${servers[@]/%/.json}")
files=("${files[@]/#/$results/}")
if ((${#files[@]} > 1)); then
    vllm-mlx bench-serve compare "${files[@]}" --format markdown \
        --measures ttft_p50,ttft_p95,tpot_mean,itl_p99,output_tps,input_tps
else
    vllm-mlx bench-serve report "${files[@]}" --format markdown
fi
for server in "${servers[@]}"; do
    python3 - "$results/$server-stream.json" "$results/$server-long.json" "$server" <<'PYTHON'
import datetime
import json
import sys

stream, long = (json.load(open(path))["rows"][0] for path in sys.argv[1:3])
began = [datetime.datetime.fromisoformat(row["timestamp"]).timestamp() for row in (stream, long)]
print(f"{sys.argv[3]}: a stream beside a prompt of {long['prompt_tokens']} tokens stalled for "
      f"{stream['itl_max']:.0f} ms (its median gap {stream['itl_p50']:.1f} ms, the prompt's TTFT "
      f"{long['ttft_p50']:.0f} ms)")
if not began[0] < began[1] < began[0] + stream["duration_s"]:
    print("  but the two did not overlap: change STREAM_LEAD or STREAM_TOKENS")
PYTHON
done
