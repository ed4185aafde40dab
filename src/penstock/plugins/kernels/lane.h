// Loads and stores of one lane, for targets on which a lane is a thread.
#ifndef LOADS_NUMBERS
template <class P>
FN void load_numbers(THREAD float* to, P from) {
  UNROLL
  for (int e = 0; e < CHUNK; ++e) to[e] = float(from[e]);
}
#endif

template <class S>
FN void load_if(VB there, S source, THREAD VF* to, VI column, VI chunk) {
  if (there) {
    source.load(to, column, chunk);
  } else {
    UNROLL
    for (int e = 0; e < CHUNK; ++e) to[e] = 0.0f;
  }
}

template <class P>
FN VF load_one_if(VB there, P from, VI at) {
  return there ? float(from[at]) : 0.0f;
}

template <class T>
FN void store_if(VB there, DEVICE T* to, size_t at, VI behind, VF value) {
  if (there) to[at + behind] = T(value);
}
