#!/usr/bin/env bash
# The main job: SmolLM2 answers, drafted by its own layers, gated, and verified exactly.
# Arguments, if any, replace the demonstration's own and go to experiments/generate.py.
set -euo pipefail
cd "$(dirname "$0")"
source scripts/environment.sh
environment hf
if [ $# -eq 0 ]; then
  set -- --model smollm2 --chat --prompt "Why is the sky blue? Answer in two sentences." \
    --temperature 0.8 --drafter layer_skip --verifier token --gate picked \
    --threshold 0.3 --num_draft_tokens 3 --seed 0 --max_new_tokens 96 --verify_target
fi
exec .venv/bin/python experiments/generate.py "$@"
