// CSV files of records whose columns are data. The first line is a comment with the settings that the rows
// belong to, the second names the columns.
#ifndef LCE_TOOLS_CURVES_TABLE_H
#define LCE_TOOLS_CURVES_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

typedef enum {
  COLUMN_NAME,    // int, written by its name
  COLUMN_INTEGER, // int64_t or size_t
  COLUMN_NUMBER,  // double
} ColumnKind;

typedef struct {
  const char *name;
  ColumnKind kind;
  size_t offset;             // of the field in the record
  bool optional;             // empty unless positive and finite; read as 0
  const char *const *values; // of COLUMN_NAME, NULL at the end
} Column;

typedef struct {
  const char *mark; // how the comment begins: "# lce.c memory curve; "
  const Column *columns;
  int count;
} Table;

enum { TABLE_LINE = 4096 };

void table_write_header(FILE *out, const Table *table, const char *settings);
void table_write_row(FILE *out, const Table *table, const void *record);

// Opens the file and reads its settings (at most `size` bytes). NULL when there is none, or, with *damaged set,
// when it is no such file.
FILE *table_open(const Table *table, const char *path, char *settings, size_t size, bool *damaged);
// Reads the next row; false at the end, where a row that a killed writer left unfinished is dropped. Fails,
// naming the line, on what is no row.
bool table_read_row(FILE *in, const Table *table, const char *path, int line, void *record);

#endif
