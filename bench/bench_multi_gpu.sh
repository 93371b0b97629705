#!/usr/bin/env bash
# The IntraNode op among the GPUs of this host, one process for each: correct, and beside NCCL and the peer copy rate.
#
#   bench/bench_multi_gpu.sh [--device cuda|cpu] [--pes N] [--tiny] [--parts abc] [--out DIR] [--commit TEXT]
#
#   --pes     processes; default: as many as there are GPUs, 2 where there are fewer (they share a GPU, or are emulated:
#             that tries the command, its times say nothing)
#   --tiny    small problems, to try the command
#   --parts   a: every element checked, over IPC and over VMM handles; b: times, with d, the ratio to peer copies; c: RDNA4
#   --out     directory for JSONL files and plots; --commit: of the sources, where they have no .git
#
# Ends with status 1 when a part has failed; the others run all the same. PYTHON chooses the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
device=cuda pes= tiny= parts=abc out= commit=
usage() { sed -n '2,13s/^# \{0,1\}//p' "$0"; }
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=$2; shift 2 ;;
        --pes) pes=$2; shift 2 ;;
        --tiny) tiny=yes; shift ;;
        --parts) parts=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        --commit) commit=$2; shift 2 ;;
        -h | --help) usage; exit 0 ;;
        *) echo "$0: unknown option $1" >&2; usage >&2; exit 2 ;;
    esac
done
case $device in cuda | cpu) ;; *) echo "$0: --device: want cuda or cpu, got $device" >&2; exit 2 ;; esac

gpus=0
[ "$device" = cpu ] || gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 1
if [ "$device" = cuda ] && [ "$gpus" = 0 ]; then
    echo "$0: --device cuda: this host has no GPU that torch sees" >&2
    exit 1
fi
[ -n "$pes" ] || pes=$((gpus > 1 ? gpus : 2))

# multicast over NVLink stays off: it can put GPUs out of service that others share
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export MORI_TRITON_DEVICE=$device
# a first call compiles on one PE while others wait for it
export MORI_TRITON_WAIT_TIMEOUT=${MORI_TRITON_WAIT_TIMEOUT:-300}
[ "$device" = cpu ] && export MORI_SHMEM_HEAP_SIZE=${MORI_SHMEM_HEAP_SIZE:-64M}
export MORI_SHMEM_HEAP_SIZE=${MORI_SHMEM_HEAP_SIZE:-8G}

common=(--device "$device" ${out:+--out "$out"} ${commit:+--commit "$commit"})
failed=()
part() {
    printf '\n== %s\n' "$1"
    shift
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$pes" "$@" || failed+=("$*")
}

if [[ $parts == *a* ]]; then
    for mode in static_heap vmm; do
        MORI_SHMEM_MODE=$mode part "every element, MORI_SHMEM_MODE=$mode" \
            -m bench.multi_gpu.check "${common[@]}" ${tiny:+--tiny --rounds 1}
    done
fi
if [[ $parts == *b* ]]; then
    problem=()
    [ -z "$tiny" ] || problem=(--tokens 4 --hidden 64 --topk 2 --experts $((2 * pes)) --samples 3 --peer-bytes 65536)
    part "times" -m bench.multi_gpu.compare "${common[@]}" "${problem[@]}"
fi
if [[ $parts == *c* ]]; then
    matrix=(--hidden-sizes 2048,3072,4096,5120,7168,8192 --tokens 8,32,64,128,256,512,1024,4096,8192,16384
        --topks 8 --dtypes bf16 --experts 256 --weights on --warmup 10 --rounds 4 --samples 30 --seed 20261225)
    [ -z "$tiny" ] || matrix=(--hidden-sizes 64,128 --tokens 3 --topks 2 --experts 8 --warmup 1 --rounds 2 --samples 2)
    if [ "$pes" = 2 ] || [ "$pes" = 4 ]; then
        part "RDNA4's matrix" bench/bench_rdna4_ep.py --device "$device" "${matrix[@]}" \
            ${out:+--output "$out/rdna4-ep$pes.jsonl"} ${commit:+--commit "$commit"}
    else
        printf '\n== the RDNA4 op is of 2 or 4 PEs, not %s: its matrix is not run\n' "$pes"
    fi
fi

for what in "${failed[@]}"; do echo "failed: $what" >&2; done
[ ${#failed[@]} = 0 ]
