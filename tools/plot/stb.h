// The parts of stb that drawing uses. stb.c holds their code, once.
#ifndef LCE_TOOLS_PLOT_STB_H
#define LCE_TOOLS_PLOT_STB_H

#ifdef HAVE_STB
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include <stb/stb_image_write.h>
#include <stb/stb_truetype.h>
#pragma GCC diagnostic pop
#endif

#endif
