  // One simdgroup per stacked row and KV head; each lane has every 32nd element of the values.
  const int each = (VALUE_DIM + 31) / 32;
  const int stacked = int(GROUP_X), head = int(GROUP_Y);
  const int per_row = plan[0] * plan[1], kv_heads = plan[2], partials = plan[3];
  const int row = stacked / per_row, of_row = stacked % per_row;
  const int query_head = head * plan[0] + of_row / plan[1];
  const size_t first = size_t(head) * partials + of_row;
  FOR_SIMDGROUPS {
    float best = SINKS ? sinks[query_head] : MASKED;
    for (int i = lists[row]; i < lists[row + 1]; ++i) best = MAX(best, tops[first + lists[i]]);
    float total = SINKS ? EXP2(sinks[query_head] - best) : 0.0f;
    VF mixed[each];
    UNROLL
    for (int c = 0; c < each; ++c) mixed[c] = 0.0f;
    for (int i = lists[row]; i < lists[row + 1]; ++i) {
      const size_t from = first + lists[i];
      const float share = EXP2(tops[from] - best);
      total += share * totals[from];
      Numbers<DEVICE const float*, 1> part = {mixeds + from * VALUE_DIM};
      UNROLL
      for (int c = 0; c < each; ++c) {
        const VI number = LANE + c * 32;
        mixed[c] += share * load_one_if(number < VALUE_DIM, part.numbers, number);
      }
    }
    WRITE_MERGED
  }
