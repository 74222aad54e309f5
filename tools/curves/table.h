// CSV files of records whose columns are data. The first line is a comment with the settings that the rows
// belong to, the second names the columns.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
  const char *name;
  size_t offset;             // of the field in the record
  const char *const *values; // the field is an int, written as one of these words (NULL at the end);
  bool number;               // or a double; else an int64_t or size_t
  bool optional;             // empty unless positive and finite; read as 0
} Column;

// What begins a column that is called as its field is.
#define COLUMN(record, field) .name = #field, .offset = offsetof(record, field)

typedef struct {
  const char *what; // "memory curve"
  const Column *columns;
  int count;
  size_t record_size;
} Table;

// Replaces the file: on disk when it returns, and readers never see half of it.
void table_write(const Table *table, const char *path, const char *settings, const void *records, int count);

// Reads the settings (fewer than `size` bytes) and returns the rows as records, which the caller frees; NULL when there
// is no file. A last row that a killed writer left unfinished is dropped. Fails, naming the line, on what is no row.
void *table_read(const Table *table, const char *path, char *settings, size_t size, int *count,
                 int64_t *capacity);
