  // Several simdgroups have different rows but read the same columns. TILE columns at a time are
  // copied to threadgroup memory, without conversion, so that each is loaded once.
  TILES
  for (int start = FIRST_TILE; start < first + count; start += TILE) {
    const int stop = smaller(start + TILE, first + count);
    FOR_SIMDGROUPS {
      FOR_LANES(l) {
        const int own = int(SIMDGROUP) * 32 + l, threads = 32 * SIMDGROUPS;
        STAGE
      }
    }
    BARRIER;
    FOR_SIMDGROUPS {
      if (tile_first + int(SIMDGROUP) * ROWS < stacked) {
        attend<ROWS, LANES, KEY_DIM, VALUE_DIM>(
            KEY_TILE, VALUE_TILE, start, larger(start, first), stop, LANE, MY(limits), MY(query),
            MY(top), MY(total), MY(mixed));
      }
    }
    BARRIER;
  }
