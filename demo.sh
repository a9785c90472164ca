#!/usr/bin/env bash
# The main job: the bundled model writes, drafted by its own MTP head, gated, and
# verified exactly.
# Arguments, if any, replace the demonstration's own and go to experiments/generate.py.
set -euo pipefail
cd "$(dirname "$0")"
source scripts/environment.sh
# Another model needs its tokenizer's packages.
extra=demo
case " $* " in *" --model"*) extra=hf ;; esac
environment "$extra"
if [ $# -eq 0 ]; then
  set -- --model bundled --prompt "HAMLET.  To be, or not to be" --temperature 0.8 \
    --drafter mtp --verifier token --gate picked --threshold 0.3 --num_draft_tokens 3 \
    --seed 0 --max_new_tokens 256 --verify_target
fi
exec .venv/bin/python experiments/generate.py "$@"
