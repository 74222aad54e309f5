// Reads a picture back, as another program would.
#ifndef LCE_TESTS_PNG_H
#define LCE_TESTS_PNG_H

typedef struct {
  int width, height;
  unsigned char *rgb; // NULL when the file is no PNG, or this build has no stb
} Image;

Image image_read(const char *path);
void image_free(Image *image);

#endif
