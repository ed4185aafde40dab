// Attention of a group of rows over a span of columns; common to all targets.
//
// The code is that of one lane. VF, VI and VB are values that differ between lanes; plain types are
// equal in all lanes of a simdgroup. Names in capitals are macros of metal.h, cuda.h and, in tests,
// lockstep.h.

FN int smaller(int a, int b) { return a < b ? a : b; }
FN int larger(int a, int b) { return a > b ? a : b; }

// Raw values: columns of DIM, from column 0 of a head on.
template <class P, int DIM>
struct Numbers {
  P numbers;

  FN void load(THREAD float* to, int column, int chunk) const {
    load_numbers(to, numbers + (column * DIM + chunk * CHUNK));
  }
};

// Codes of BITS bits, one little-endian bit stream per column. GROUP neighbors share a scale and an
// offset; with GROUP 0 a column has one scale, and its levels are `step` apart, symmetric to zero.
template <class P, class S, int DIM, int BITS, int GROUP>
struct Codes {
  P codes;
  S scales;
  S offsets;
  float step;

  FN void load(THREAD float* to, int column, int chunk) const {
    const int groups = GROUP == 0 ? 1 : DIM / (GROUP == 0 ? 1 : GROUP);
    const int group = column * groups + (GROUP == 0 ? 0 : chunk * CHUNK / (GROUP == 0 ? 1 : GROUP));
    float scale = float(scales[group]), offset;
    if (GROUP == 0) {
      scale *= step;
      offset = scale * (-0.5f * float((1 << BITS) - 1));
    } else {
      offset = float(offsets[group]);
    }
    const uint32_t first = uint32_t(chunk) * (CHUNK * BITS);
    const uint32_t at = uint32_t(column) * (DIM * BITS / 32) + first / 32, low = first % 32;
    UNROLL
    for (int e = 0; e < CHUNK; ++e) {
      const uint32_t bit = low + e * BITS, shift = bit % 32;
      uint32_t code = codes[at + bit / 32] >> shift;
      if (32 % BITS != 0 && shift + BITS > 32) code |= codes[at + bit / 32 + 1] << (32 - shift);
      to[e] = scale * float(code & ((1u << BITS) - 1u)) + offset;
    }
  }
};

// Codes of columns with one scale: BITS + 1 bits in the first half of a column, BITS in the second.
template <class P, class S, int DIM, int BITS>
struct Halves {
  P finer;
  P coarser;
  S scales;
  float finer_step;
  float coarser_step;

  FN void load(THREAD float* to, int column, int chunk) const {
    const int chunks = DIM / 2 / CHUNK;
    if (chunk < chunks) {
      const Codes<P, S, DIM / 2, BITS + 1, 0> part = {finer, scales, scales, finer_step};
      part.load(to, column, chunk);
    } else {
      const Codes<P, S, DIM / 2, BITS, 0> part = {coarser, scales, scales, coarser_step};
      part.load(to, column, chunk - chunks);
    }
  }
};

// Per-channel codes, in a tile: 64 columns of a channel share a scale and an offset. In memory the
// columns of a channel are one bit stream. A tile has the first words of all channels, then the
// second ones, so that lanes read adjacent words.
template <class P, class S, int DIM, int BITS>
struct Channels {
  P codes;
  S scales;
  S offsets;

  FN void load(THREAD float* to, int column, int chunk) const {
    const uint32_t bit = uint32_t(column) * BITS, shift = bit % 32;
    const uint32_t at = bit / 32 * DIM + uint32_t(chunk) * CHUNK;
    UNROLL
    for (int e = 0; e < CHUNK; ++e) {
      uint32_t code = codes[at + e] >> shift;
      if (32 % BITS != 0 && shift + BITS > 32) code |= codes[at + DIM + e] << (32 - shift);
      const int channel = chunk * CHUNK + e;
      to[e] = float(scales[channel]) * float(code & ((1u << BITS) - 1u)) + float(offsets[channel]);
    }
  }
};

// Index in memory of word i of a tile that starts at column `start`.
template <int DIM, int BITS, int TILE>
FN int word_of_span(int start, int i) {
  const int words = TILE / 32 * BITS, channel = i / words, word = i % words;
  return (start / 64 * DIM + channel) * (2 * BITS) + start % 64 / 32 * BITS + word;
}

template <int DIM, int BITS, int TILE>
FN int word_of_tile(int i) {
  const int words = TILE / 32 * BITS;
  return i % words * DIM + i / words;
}

// Attend for the ROWS rows of a simdgroup to the columns first..stop-1. LANES lanes share a column;
// the others read the next columns. Column 0 of the sources is `origin`. Each row has four limits:
// it sees column c if c < end, c < last, and c < keep or c >= low.
template <int ROWS, int LANES, int KEY_DIM, int VALUE_DIM, class K, class V>
FN void attend(
    K keys, V values, int origin, int first, int stop, VI lane, THREAD const int* limits,
    THREAD const VF* query, THREAD VF* top, THREAD VF* total, THREAD VF* mixed) {
  const int key_chunks = (KEY_DIM / CHUNK + LANES - 1) / LANES;
  const int value_chunks = (VALUE_DIM / CHUNK + LANES - 1) / LANES;
  const int wide = 32 / LANES;
  const VI part = lane % LANES, own = lane / LANES;
  for (int block = first; block < stop; block += COLUMNS * wide) {
    VF weight[COLUMNS * ROWS];
    UNROLL
    for (int u = 0; u < COLUMNS; ++u) {
      const VI column = own + (block + u * wide);
      UNROLL
      for (int i = 0; i < ROWS; ++i) weight[u * ROWS + i] = 0.0f;
      UNROLL
      for (int c = 0; c < key_chunks; ++c) {
        const VI chunk = part + c * LANES;
        VF key[CHUNK];
        load_if((column < stop) && (chunk < KEY_DIM / CHUNK), keys, key, column - origin, chunk);
        UNROLL
        for (int i = 0; i < ROWS; ++i) {
          UNROLL
          for (int e = 0; e < CHUNK; ++e) {
            weight[u * ROWS + i] += query[(i * key_chunks + c) * CHUNK + e] * key[e];
          }
        }
      }
    }
    UNROLL
    for (int m = LANES / 2; m > 0; m /= 2) {
      UNROLL
      for (int s = 0; s < COLUMNS * ROWS; ++s) weight[s] += XOR_SHUFFLE(weight[s], m);
    }
    UNROLL
    for (int i = 0; i < ROWS; ++i) {
      THREAD const int* limit = limits + 4 * i;
      VF best = top[i];
      UNROLL
      for (int u = 0; u < COLUMNS; ++u) {
        const VI column = own + (block + u * wide);
        const VB seen = (column < stop) && (column < limit[0]) && (column < limit[1]) &&
            ((column < limit[3]) || (column >= limit[2]));
        weight[u * ROWS + i] = SELECT(seen, weight[u * ROWS + i], VF(MASKED));
        best = MAX(best, weight[u * ROWS + i]);
      }
      const VF fade = EXP2(top[i] - best);
      top[i] = best;
      total[i] *= fade;
      UNROLL
      for (int e = 0; e < value_chunks * CHUNK; ++e) mixed[i * value_chunks * CHUNK + e] *= fade;
      UNROLL
      for (int u = 0; u < COLUMNS; ++u) {
        const VF score = weight[u * ROWS + i];
        weight[u * ROWS + i] = SELECT(score <= MASKED, VF(0.0f), EXP2(score - best));
        total[i] += weight[u * ROWS + i];
      }
    }
    UNROLL
    for (int u = 0; u < COLUMNS; ++u) {
      const VI column = own + (block + u * wide);
      UNROLL
      for (int c = 0; c < value_chunks; ++c) {
        const VI chunk = part + c * LANES;
        VF value[CHUNK];
        load_if(
            (column < stop) && (chunk < VALUE_DIM / CHUNK), values, value, column - origin, chunk);
        UNROLL
        for (int i = 0; i < ROWS; ++i) {
          UNROLL
          for (int e = 0; e < CHUNK; ++e) {
            mixed[(i * value_chunks + c) * CHUNK + e] += weight[u * ROWS + i] * value[e];
          }
        }
      }
    }
  }
}

// Merge the results of lanes that read different columns; afterwards all lanes have the result.
template <int LANES, int NUMBERS>
FN void merge_lanes(THREAD VF* top, THREAD VF* total, THREAD VF* mixed) {
  UNROLL
  for (int m = 16; m >= LANES; m /= 2) {
    const VF best = MAX(*top, XOR_SHUFFLE(*top, m));
    const VF fade = EXP2(*top - best);
    *top = best;
    *total *= fade;
    *total += XOR_SHUFFLE(*total, m);
    UNROLL
    for (int e = 0; e < NUMBERS; ++e) {
      mixed[e] *= fade;
      mixed[e] += XOR_SHUFFLE(mixed[e], m);
    }
  }
}
