#!/usr/bin/env bash
# Plan three models on two topologies each, then profile, plan, train and compare a small
# transformer on this machine. Every command is printed before it runs. Writes demo-output/:
# plan.json and timeline.html are BERT-large on eight servers of four V100; transformer.png shows
# the prediction above the measurement.
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

# Limited memory: a periodic plan, in which a device may hold several stages.
images=(--model demo-output/images.json --cluster demo-output/images.cluster.json)
run stagewright model resnet50 --device v100 --microbatch-size 8 --image-size 1000 \
    -o demo-output/images.json
run stagewright cluster 1x4 --device v100 --intra 12GB/s -o demo-output/images.cluster.json
run stagewright plan "${images[@]}" --microbatches 8 --planner madpipe --memory-limit 12GB \
    --group-size 1 --time-limit "$seconds" -o demo-output/periodic.json
run stagewright show demo-output/periodic.json --png demo-output/periodic.png

# A real run: measure the layers and links of this machine, train by a pipeline with a process for
# each core (two to four), and compare the parameters with those of the unsplit model.
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)))')
ranks=$((cores < 2 ? 2 : cores > 4 ? 4 : cores))
network=(--module examples.models:transformer --data examples.models:batches)
transformer=demo-output/transformer
run stagewright profile "${network[@]}" --microbatch-sizes 4 --dtype float64 --ranks $ranks \
    --optimizer sgd:lr=0.1,momentum=0.9 -o $transformer.json
run stagewright profile-links --ranks $ranks -o $transformer.links.json
run stagewright plan --model $transformer.json --cluster $transformer.links.json \
    --microbatches 4 --planner order --time-limit "$seconds" -o $transformer.plan.json
run stagewright run $transformer.plan.json "${network[@]}" --optimizer sgd:lr=0.1,momentum=0.9 \
    --dtype float64 --steps 20 --save-parameters $transformer.pt --trace $transformer.trace.json
run python examples/unsplit.py "${network[@]}" --steps 20 $transformer.pt
run stagewright compare $transformer.plan.json $transformer.trace.json --png $transformer.png
if [ "$cores" -lt 2 ]; then
    echo "The prediction assumes one core per rank (2); this machine has $cores."
fi
