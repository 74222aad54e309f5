// The program's training step, for tests, which have a main of their own.
#define main train_main
#include "train.c"
