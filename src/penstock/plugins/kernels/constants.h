// What all kernels count in.
#define MASKED -1e30f
#define CHUNK 8      // numbers that a lane loads at a time: 16 bytes of half precision
#define COLUMNS 4    // columns that a lane reads between two looks at the running maximum
#define TASK 9       // ints of a task, see dispatches.py
#define HEADER 5     // ints in front of the tasks
