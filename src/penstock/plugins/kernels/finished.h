    const int token = of_row % plan[1];
    const size_t to = (size_t(row) * kv_heads * plan[0] + query_head) * plan[1] + token;
    UNROLL
    for (int c = 0; c < each; ++c) {
      const VI number = LANE + c * 32;
      store_if(number < VALUE_DIM, result, to * VALUE_DIM, number, mixed[c] / total);
    }
