#!/usr/bin/env bash
# Plan three models on two topologies each, by commands that can be typed as they are printed.
# Writes demo-output/: plan.json and timeline.html are BERT-large on eight servers of four V100.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-8}  # for each plan

run() { printf '\n$ %s\n' "$*"; "$@"; }
plan() {  # model, cluster, file
    run stagewright plan --model "examples/profiles/$1.json" --cluster "examples/clusters/$2.json" \
        --microbatches 8 --time-limit "$seconds" -o "demo-output/$3.json"
}

mkdir -p demo-output
plan bert-large.v100 v100-8x4 plan
plan bert-large.v100 dgx1 bert-large.dgx1
for model in gpt-12x512.cpu resnet50.cpu; do
    plan "$model" cpu-2x4 "$model.2x4"
    plan "$model" cpu-ring-6 "$model.ring-6"
done

problem=(--model examples/profiles/bert-large.v100.json --cluster examples/clusters/v100-8x4.json)
run stagewright check demo-output/plan.json "${problem[@]}"
run stagewright simulate demo-output/plan.json "${problem[@]}"
run stagewright show demo-output/plan.json --html demo-output/timeline.html
