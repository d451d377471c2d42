#!/bin/sh
# The study of docs/studies/muon-on-gdn.yaml, from data to report. Resumable: run it again.
# CHATS is JSONL of chats, about three times the demo's; JOBS trials run at the same time.
set -eu
: "${CHATS:?set CHATS to a JSONL file of chats}"
JOBS=${JOBS:-1}
OUT=build/study
drafttape extract data.paths="[$CHATS]" cache.root=$OUT/cache snapshot=study
drafttape sweep docs/studies/muon-on-gdn.yaml out=$OUT/tune launcher="${LAUNCHER:-basic}" jobs="$JOBS"
python docs/studies/second_stage.py $OUT/tune docs/studies/muon-on-gdn.yaml > $OUT/final.yaml
drafttape sweep $OUT/final.yaml out=$OUT/final launcher="${LAUNCHER:-basic}" jobs="$JOBS"
# shellcheck disable=SC2046
drafttape compare $(python docs/studies/second_stage.py --runs $OUT/final) \
    report=$OUT/report.html summary=$OUT/summary.json record=$OUT/decision.md \
    question="Is Muon better than AdamW for a GDN drafter?"
