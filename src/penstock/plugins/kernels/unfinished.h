    const size_t to = size_t(head) * plan[4] + stacked;
    store_if(LANE == 0, top, to, VI(0), VF(best));
    store_if(LANE == 0, sum, to, VI(0), VF(total));
    UNROLL
    for (int c = 0; c < each; ++c) {
      const VI number = LANE + c * 32;
      store_if(number < VALUE_DIM, mix, to * VALUE_DIM, number, mixed[c]);
    }
