  // One threadgroup per task, KV head, and up to ROWS * SIMDGROUPS of the task's rows.
  const int key_chunks = (KEY_DIM / CHUNK + LANES - 1) / LANES;
  const int value_chunks = (VALUE_DIM / CHUNK + LANES - 1) / LANES;
  const int at = HEADER + int(GROUP_X) * TASK;
  const int head = int(GROUP_Y), kv_heads = plan[2], partials = plan[3];
  const int span = plan[at], first = plan[at + 3], count = plan[at + 4];
  const int per_row = plan[0] * plan[1];  // query heads per KV head, times new tokens
  const int stacked = plan[at + 6] * per_row;
  const int tile_first = int(GROUP_Z) * ROWS * SIMDGROUPS;
  if (tile_first >= stacked) return;
  // In columns; in values it may exceed 2^31.
  const size_t column_0 = size_t(plan[at + 1]) + size_t(head) * size_t(plan[at + 2]);

  ACROSS(VF, query, ROWS * key_chunks * CHUNK);
  ACROSS(VF, mixed, ROWS * value_chunks * CHUNK);
  ACROSS(VF, top, ROWS);
  ACROSS(VF, total, ROWS);
  ACROSS(int, limits, ROWS * 4);

  FOR_SIMDGROUPS {
    UNROLL
    for (int i = 0; i < ROWS; ++i) {
      const int s = tile_first + int(SIMDGROUP) * ROWS + i, row = s / per_row;
      const int of_row = s % per_row, token = of_row % plan[1];
      const bool there = s < stacked;
      const int query_head = head * plan[0] + of_row / plan[1];
      const int sequence = plan[at + 5] + row;
      const int place = there ? (sequence * kv_heads * plan[0] + query_head) * plan[1] + token : 0;
      Numbers<DEVICE const Q*, KEY_DIM> rows_queries = {queries};
      UNROLL
      for (int c = 0; c < key_chunks; ++c) {
        const VI chunk = LANE % LANES + c * LANES;
        THREAD VF* to = MY(query) + (i * key_chunks + c) * CHUNK;
        load_if((chunk < KEY_DIM / CHUNK) && VB(there), rows_queries, to, VI(place), chunk);
        UNROLL
        for (int e = 0; e < CHUNK; ++e) to[e] *= numbers[0];
      }
      const int limit = plan[at + 8] + 4 * (there ? row : 0);
      MY(limits)[4 * i] = there ? plan[limit] : 0;
      MY(limits)[4 * i + 1] = plan[limit + 1] + token;
      MY(limits)[4 * i + 2] = plan[limit + 2] + token;
      MY(limits)[4 * i + 3] = plan[limit + 3];
      MY(top)[i] = MASKED;
      MY(total)[i] = 0.0f;
      UNROLL
      for (int e = 0; e < value_chunks * CHUNK; ++e) {
        MY(mixed)[i * value_chunks * CHUNK + e] = 0.0f;
      }
    }
  }

  PICK_SPAN
  READ_SPAN

  FOR_SIMDGROUPS {
    UNROLL
    for (int i = 0; i < ROWS; ++i) {
      merge_lanes<LANES, value_chunks * CHUNK>(
          MY(top) + i, MY(total) + i, MY(mixed) + i * value_chunks * CHUNK);
      const int s = tile_first + int(SIMDGROUP) * ROWS + i;
      const bool there = s < stacked;
      const size_t to = size_t(head) * partials + plan[at + 7] + (there ? s : 0);
      store_if((LANE == 0) && VB(there), tops, to, VI(0), MY(top)[i]);
      store_if((LANE == 0) && VB(there), totals, to, VI(0), MY(total)[i]);
      UNROLL
      for (int c = 0; c < value_chunks; ++c) {
        const VI chunk = LANE + c * LANES;
        UNROLL
        for (int e = 0; e < CHUNK; ++e) {
          store_if(
              (LANE < LANES) && (chunk < VALUE_DIM / CHUNK) && VB(there), mixeds, to * VALUE_DIM,
              chunk * CHUNK + e, MY(mixed)[(i * value_chunks + c) * CHUNK + e]);
        }
      }
    }
  }
