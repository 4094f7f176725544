// The loops of reduce_loops.h for one instruction set; build.py gives the flags.

#define NANOTF_REDUCE_NAME ReduceBaseline
#include "reduce_loops.h"
