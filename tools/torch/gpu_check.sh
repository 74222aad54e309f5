# The package's part of tools/gpu_check.sh, which reads it.
if wants tests; then
  check 4 400 "" $(test_programs pytorch/test_{batch_invariant,divergence,ids,log_prob_values,log_probs,operations})
  LCE_HOPPER=0 check 4 400 -portable $(test_programs pytorch/test_{ids,log_prob_values,log_probs})
  # Builds liblce.so with CUDA before it runs.
  check 1 570 "" tests/pytorch/test_{liblce,functions,divergence,ids,training}.py
fi

# The layer through PyTorch and C, beside others that are installed; `all` leaves it out without PyTorch.
if [[ $parts == *" peers "* ]] || { wants peers && python3 -c 'import torch.cuda' 2>/dev/null; }; then
  shapes=()
  [ "$DEVICE" = cuda ] || shapes=(--shapes 64x64x2000)
  run liblce 200 make -s liblce.so && run peers 400 tools/bench_peers.py --json --no-errors --rounds 3 --device "$DEVICE" "${shapes[@]}" &&
    show peers peers.log peer 'N {tokens} H {hidden_size} V {vocab_size}, {peer}: {r.get("why") or f"{ms:.2f} ms, {ratio:.3f}, {(held_bytes or 0) / 2**20:.0f} MiB"}'
  run divergence 400 tools/bench_peers.py --divergence --json --no-errors --rounds 3 --device "$DEVICE" "${shapes[@]}" &&
    show divergence divergence.log peer '{title}, {peer}: {r.get("why") or f"{ms:.2f} ms, {ratio:.3f}, {(held_bytes or 0) / 2**20:.0f} MiB"}'
  run trainer 500 tools/bench_peers.py --trainer --json --device "$DEVICE" &&
    show trainer trainer.log peer '{title}, {peer}: {r.get("why") or f"{tokens_per_second:,.0f} tokens/s, {(held_bytes or 0) / 2**30:.1f} GiB"}'
fi

if wants ranks && [ "$ranks" -gt 1 ]; then
  NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} LCE_GPU_RANKS=$ranks TEST_TIMEOUT=560 check 1 570 "-$ranks-gpus" $(test_programs pytorch/test_split_head)
fi
