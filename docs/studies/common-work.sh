#!/bin/sh
# The common work of docs/drafter.md: one drafter of 19.4 M parameters in 150 updates, and its real
# acceptance over all held-out prompts. CHATS is JSONL of chats with a field `split`; further words
# are overrides of the training (seed=1, loss.gamma=4, …).
set -eu
: "${CHATS:?set CHATS to a JSONL file of chats}"
OUT=build/common-work
drafttape extract data.paths="[$CHATS]" target.tap_rule=explicit \
    target.layer_ids="[1,8,14,20,27]" last_hidden=true cache.root=$OUT/cache
drafttape train experiment=demo cache.root=$OUT/cache run_dir=$OUT/run trainer.steps=150 \
    trainer.eval_every=50 drafter.block_size=16 drafter.bidirectional_block=true \
    drafter.linear_num_key_heads=8 drafter.linear_num_value_heads=8 drafter.num_attention_heads=8 \
    drafter.num_key_value_heads=4 drafter.intermediate_size=1264 drafter.logit_std=3.25 \
    batch.tokens_per_row=576 batch.anchors_per_sample=10 batch.anchors_per_row=40 \
    optimizer=muon optimizer.lr=3e-3 optimizer.adamw_lr=1e-2 \
    loss.cross_entropy=0 loss.kl=1 loss.gamma=2 "$@"
drafttape eval $OUT/run max_new_tokens=64 batch_size=26
