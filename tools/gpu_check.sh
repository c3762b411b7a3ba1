#!/usr/bin/env bash
# What is shown on a machine with a GPU, part by part: build, contract, cases, tests, walk, main job.
#   TRAINSTREAM_PYTHON=python3 CASES=<folder of run_cases.py> OUT=<folder> tools/gpu_check.sh PART...
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python=${TRAINSTREAM_PYTHON:-python3}
out=${OUT:-build/gpu}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

build() {
    "$python" setup.py -q egg_info build_ext --inplace >"$out/build.log" 2>&1 ||
        { tail -30 "$out/build.log"; return 1; }
}
contract() {
    cmake -S . -B build/gpu-core -G Ninja -DCMAKE_BUILD_TYPE=Release -DTRAINSTREAM_CUDA=ON \
        >"$out/cmake.log" 2>&1 && cmake --build build/gpu-core -j16 >>"$out/cmake.log" 2>&1 ||
        { tail -30 "$out/cmake.log"; return 1; }
    ctest --test-dir build/gpu-core -R "Device|HostPool|Cuda" --output-on-failure | tail -30
}
cases() {
    tools/cases.sh "${CASE_RUNNERS:-5}" "$python" "$CASES/run_cases.py" \
        --device "${CASE_DEVICE:-cuda}" --vram-fraction 0.35 --timeout 200
}
pytests() { "$python" -m pytest -q -m gpu --ignore=tests/ecosystem tests 2>&1 | tail -30; }
ecosystem() { "$python" -m pytest -q -m gpu tests/ecosystem 2>&1 | tail -30; }
walk() { "$python" tests/walk.py --device cuda --operations "${WALK:-10000}" --seed 7 2>&1 | tail -15; }
small() {
    timeout 300 "$python" bench/main_job.py --shape 1.26b --budget 0.4 --steps "${STEPS:-20}" \
        --folder "$out" --name main-job-1.26b
}
fit() {
    timeout 300 "$python" bench/main_job.py --shape 1.26b --fit --steps 60 --folder "$out" \
        --name main-job-fit
}
large() {
    timeout 500 "$python" bench/main_job.py --shape 7.62b --budget 25769803776 \
        --steps "${LARGE_STEPS:-20}" --folder "$out" --name main-job-7.62b
}
# Where a step's time goes under two tight budgets: own prediction, bound and waits.
phases() {
    local vram=19327352832 shape=7.62b
    for kind in stock host-optimizer; do
        PYTORCH_TRAINSTREAM=1 PYTORCH_TRAINSTREAM_CONF=vram:$vram,device:cuda timeout 200 \
            "$python" bench/step_phases.py --shape $shape --kind $kind --steps "${PHASE_STEPS:-9}" \
            --folder "$out" --name "phases-$shape-$kind" || return 1
    done
    PYTORCH_TRAINSTREAM=1 PYTORCH_TRAINSTREAM_CONF=vram:4402341478,device:cuda timeout 100 \
        "$python" bench/step_phases.py --shape 1.26b --steps 12 --folder "$out" --name phases-1.26b
}
demo() { "$python" tools/demo.py 2>&1 | tail -40; }

status=0
for part in "$@"; do
    start=$SECONDS
    echo "== $part"
    "$part" || { status=1; echo "FAILED: $part"; }
    echo "== $part took $((SECONDS - start)) s"
done
exit $status
