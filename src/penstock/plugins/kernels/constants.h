// Constants of all kernels.
#define MASKED -1e30f
#define CHUNK 8      // values that a lane loads at a time: 16 bytes in half precision
#define COLUMNS 4    // columns that a lane reads between updates of the running maximum
#define TASK 9       // ints per task, see dispatches.py
#define HEADER 5     // ints before the tasks
