  // A single simdgroup reads the span in place.
  FOR_SIMDGROUPS {
    attend<ROWS, LANES, KEY_DIM, VALUE_DIM>(
        KEYS_HERE, VALUES_HERE, 0, first, first + count, LANE, MY(limits),
        MY(query), MY(top), MY(total), MY(mixed));
  }
