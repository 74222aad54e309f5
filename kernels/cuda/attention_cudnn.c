// cuDNN's fused attention through its plain C backend API.
//
// cuDNN's attention engines are reached by describing the computation as a graph of primitive operations; the
// engine recognises the whole pattern and runs it as one or two kernels. (The one-operation descriptors
// CUDNN_BACKEND_OPERATION_SDPA_FWD and _BWD have no causal mask before cuDNN 9.21, so they are not used.)
// Nothing between the operations ever exists in memory: those tensors are "virtual". Tensors are
// [batch, head, token, D] with strides, so packed qkv rows are read and written where they lie.
//
// A plan is made once per shape and kept. attention_scratch.c gives the workspace.
#include "kernels/cuda/attention_kernels.h"

#include <stddef.h>
#include <stdint.h>

#ifndef HAVE_CUDNN

const char *attention_cudnn_absent(void) {
  return "the program was built without cuDNN";
}

bool attention_cudnn_forward(const AttentionForward *a, cudaStream_t stream, const char **reason) {
  (void)a, (void)stream;
  *reason = attention_cudnn_absent();
  return false;
}

bool attention_cudnn_backward(const AttentionBackward *a, cudaStream_t stream, const char **reason) {
  (void)a, (void)stream;
  *reason = attention_cudnn_absent();
  return false;
}

#else

#include <cudnn.h>
#include <math.h>
#include <string.h>

#include "kernels/cuda/attention.h"

const char *attention_cudnn_absent(void) {
  return cudnnGetVersion() >= 91000 ? NULL : "the cuDNN found is older than 9.10";
}

// --- a graph under construction ----------------------------------------------------------------------------

typedef cudnnBackendDescriptor_t Node;

typedef struct {
  cudnnStatus_t status; // of the first call that failed; later calls do nothing
  Node made[160], operations[48];
  int made_count, operation_count;
  int64_t next_virtual;
} Graph;

typedef struct {
  int64_t dims[4], strides[4];
} Layout;

static Node make(Graph *graph, cudnnBackendDescriptorType_t type) {
  Node node = NULL;
  if (graph->status == CUDNN_STATUS_SUCCESS) graph->status = cudnnBackendCreateDescriptor(type, &node);
  if (node) graph->made[graph->made_count++] = node;
  return node;
}

static void set(Graph *graph, Node node, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                int64_t count, const void *values) {
  if (graph->status == CUDNN_STATUS_SUCCESS)
    graph->status = cudnnBackendSetAttribute(node, name, type, count, values);
}

static void set_node(Graph *graph, Node node, cudnnBackendAttributeName_t name, Node value) {
  set(graph, node, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static void finish(Graph *graph, Node node) {
  if (graph->status == CUDNN_STATUS_SUCCESS) graph->status = cudnnBackendFinalize(node);
}

static void finish_operation(Graph *graph, Node node) {
  finish(graph, node);
  graph->operations[graph->operation_count++] = node;
}

static void release(Graph *graph) {
  while (graph->made_count) cudnnBackendDestroyDescriptor(graph->made[--graph->made_count]);
}

// --- tensors -----------------------------------------------------------------------------------------------

typedef enum { IN_MEMORY, VIRTUAL, BY_VALUE } Place;

// Which memory a tensor stands for when a plan runs; virtual tensors count on from FIRST_VIRTUAL.
enum {
  TENSOR_Q = 1,
  TENSOR_K,
  TENSOR_V,
  TENSOR_OUT,
  TENSOR_LSE,
  TENSOR_DOUT,
  TENSOR_DQ,
  TENSOR_DK,
  TENSOR_DV
};
enum { TENSOR_DELTA = 20, TENSOR_DQ_SUM, TENSOR_SCALE, TENSOR_MASKED, TENSOR_ONE, FIRST_VIRTUAL = 100 };

static Node tensor(Graph *graph, Place place, int64_t id, cudnnDataType_t type, Layout layout) {
  Node node = make(graph, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  int64_t alignment = 16;
  bool is_virtual = place == VIRTUAL, by_value = place == BY_VALUE;
  set(graph, node, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
  set(graph, node, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, layout.dims);
  set(graph, node, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, layout.strides);
  set(graph, node, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id);
  set(graph, node, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
  set(graph, node, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
  set(graph, node, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
  finish(graph, node);
  return node;
}

static Node between(Graph *graph, cudnnDataType_t type, Layout layout) {
  return tensor(graph, VIRTUAL, graph->next_virtual++, type, layout);
}

static Node number(Graph *graph, int64_t id) {
  return tensor(graph, BY_VALUE, id, CUDNN_DATA_FLOAT, (Layout){{1, 1, 1, 1}, {1, 1, 1, 1}});
}

// Heads of rows that lie `row` elements apart.
static Layout heads_layout(int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim, int64_t row) {
  return (Layout){{batch, heads, tokens, head_dim}, {tokens * row, head_dim, row, 1}};
}

static Layout packed_layout(int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  return (Layout){{batch, heads, rows, columns}, {heads * rows * columns, rows * columns, columns, 1}};
}

static Layout transposed(Layout l) {
  return (Layout){{l.dims[0], l.dims[1], l.dims[3], l.dims[2]},
                  {l.strides[0], l.strides[1], l.strides[3], l.strides[2]}};
}

// --- operations --------------------------------------------------------------------------------------------

typedef struct {
  cudnnPointwiseMode_t mode;
  cudnnDataType_t math;
  Node x, b, t; // operands; b and t may be absent
  int64_t axis; // of GEN_INDEX
} Pointwise;

static void pointwise_into(Graph *graph, Pointwise p, Node y) {
  Node what = make(graph, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  set(graph, what, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &p.mode);
  set(graph, what, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &p.math);
  if (p.mode == CUDNN_POINTWISE_GEN_INDEX)
    set(graph, what, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &p.axis);
  finish(graph, what);
  Node node = make(graph, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  set_node(graph, node, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, what);
  set_node(graph, node, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, p.x);
  if (p.b) set_node(graph, node, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, p.b);
  if (p.t) set_node(graph, node, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, p.t);
  set_node(graph, node, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
  finish_operation(graph, node);
}

// y = x (mode) b in fp32.
static Node pointwise(Graph *graph, cudnnPointwiseMode_t mode, Node x, Node b, cudnnDataType_t type,
                      Layout layout) {
  Node y = between(graph, type, layout);
  pointwise_into(graph, (Pointwise){.mode = mode, .math = CUDNN_DATA_FLOAT, .x = x, .b = b}, y);
  return y;
}

static void matmul_into(Graph *graph, Node a, Node b, Node c) {
  cudnnDataType_t math = CUDNN_DATA_FLOAT;
  Node what = make(graph, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  set(graph, what, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &math);
  finish(graph, what);
  Node node = make(graph, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  set_node(graph, node, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
  set_node(graph, node, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
  set_node(graph, node, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
  set_node(graph, node, CUDNN_ATTR_OPERATION_MATMUL_DESC, what);
  finish_operation(graph, node);
}

static Node matmul(Graph *graph, Node a, Node b, Layout layout) {
  Node c = between(graph, CUDNN_DATA_FLOAT, layout);
  matmul_into(graph, a, b, c);
  return c;
}

// Over every axis along which y has length 1, or a group of x's heads for each of y's.
static void reduction_into(Graph *graph, cudnnReduceTensorOp_t how, Node x, Node y) {
  cudnnDataType_t math = CUDNN_DATA_FLOAT;
  Node what = make(graph, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  set(graph, what, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &how);
  set(graph, what, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &math);
  finish(graph, what);
  Node node = make(graph, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  set_node(graph, node, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
  set_node(graph, node, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
  set_node(graph, node, CUDNN_ATTR_OPERATION_REDUCTION_DESC, what);
  finish_operation(graph, node);
}

static Node reduction(Graph *graph, cudnnReduceTensorOp_t how, Node x, Layout layout) {
  Node y = between(graph, CUDNN_DATA_FLOAT, layout);
  reduction_into(graph, how, x, y);
  return y;
}

static Node reshape(Graph *graph, Node x, cudnnDataType_t type, Layout layout) {
  Node y = between(graph, type, layout);
  Node node = make(graph, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  set_node(graph, node, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
  set_node(graph, node, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
  finish_operation(graph, node);
  return y;
}

// Scores of keys after the query become -infinity.
static Node causal(Graph *graph, Node scores, Layout layout) {
  Node query = between(graph, CUDNN_DATA_INT32, layout), key = between(graph, CUDNN_DATA_INT32, layout);
  Pointwise index = {.mode = CUDNN_POINTWISE_GEN_INDEX, .math = CUDNN_DATA_FLOAT, .x = scores, .axis = 2};
  pointwise_into(graph, index, query);
  index.axis = 3;
  pointwise_into(graph, index, key);
  Node visible = between(graph, CUDNN_DATA_BOOLEAN, layout);
  pointwise_into(
      graph, (Pointwise){.mode = CUDNN_POINTWISE_CMP_GE, .math = CUDNN_DATA_BOOLEAN, .x = query, .b = key},
      visible);
  Node masked = between(graph, CUDNN_DATA_FLOAT, layout);
  pointwise_into(graph,
                 (Pointwise){.mode = CUDNN_POINTWISE_BINARY_SELECT,
                             .math = CUDNN_DATA_FLOAT,
                             .x = scores,
                             .b = number(graph, TENSOR_MASKED),
                             .t = visible},
                 masked);
  return masked;
}

// --- the two computations ----------------------------------------------------------------------------------

// What a plan depends on. Zeroed before it is filled, so that memcmp compares it.
typedef struct {
  bool backward;
  int64_t batch, tokens, heads, key_value_heads, head_dim;
  int64_t qkv_row, out_row, dqkv_row, dout_row; // elements from row to row
} PlanKey;

static void describe_forward(Graph *g, const PlanKey *k) {
  const cudnnDataType_t f32 = CUDNN_DATA_FLOAT, bf16 = CUDNN_DATA_BFLOAT16;
  Layout q_layout = heads_layout(k->batch, k->heads, k->tokens, k->head_dim, k->qkv_row);
  Layout kv_layout = heads_layout(k->batch, k->key_value_heads, k->tokens, k->head_dim, k->qkv_row);
  Layout out_layout = heads_layout(k->batch, k->heads, k->tokens, k->head_dim, k->out_row);
  Layout square = packed_layout(k->batch, k->heads, k->tokens, k->tokens);
  Layout one_column = packed_layout(k->batch, k->heads, k->tokens, 1);

  Node q = tensor(g, IN_MEMORY, TENSOR_Q, bf16, q_layout);
  Node keys = tensor(g, IN_MEMORY, TENSOR_K, bf16, transposed(kv_layout));
  Node s = matmul(g, q, keys, square);
  s = pointwise(g, CUDNN_POINTWISE_MUL, s, number(g, TENSOR_SCALE), f32, square);
  s = causal(g, s, square);
  Node largest = reduction(g, CUDNN_REDUCE_TENSOR_MAX, s, one_column);
  s = pointwise(g, CUDNN_POINTWISE_SUB, s, largest, f32, square);
  s = pointwise(g, CUDNN_POINTWISE_EXP, s, NULL, f32, square);
  Node sum = reduction(g, CUDNN_REDUCE_TENSOR_ADD, s, one_column);
  Node log_sum = pointwise(g, CUDNN_POINTWISE_LOG, sum, NULL, f32, one_column);
  pointwise_into(g, (Pointwise){.mode = CUDNN_POINTWISE_ADD, .math = f32, .x = largest, .b = log_sum},
                 tensor(g, IN_MEMORY, TENSOR_LSE, f32, one_column));
  Node p = pointwise(g, CUDNN_POINTWISE_DIV, s, sum, bf16, square);
  matmul_into(g, p, tensor(g, IN_MEMORY, TENSOR_V, bf16, kv_layout),
              tensor(g, IN_MEMORY, TENSOR_OUT, bf16, out_layout));
}

// gradient = left^T right, left being dS or P; summed over the query heads that share a key/value head.
static void key_gradient(Graph *g, const PlanKey *k, Node left, Node right, int64_t id) {
  Layout square = packed_layout(k->batch, k->heads, k->tokens, k->tokens);
  Layout result = heads_layout(k->batch, k->key_value_heads, k->tokens, k->head_dim, k->dqkv_row);
  Node flipped = reshape(g, left, CUDNN_DATA_BFLOAT16, transposed(square));
  Node gradient = tensor(g, IN_MEMORY, id, CUDNN_DATA_BFLOAT16, result);
  if (k->heads == k->key_value_heads) {
    matmul_into(g, flipped, right, gradient);
    return;
  }
  Node by_head = between(g, CUDNN_DATA_BFLOAT16, packed_layout(k->batch, k->heads, k->tokens, k->head_dim));
  matmul_into(g, flipped, right, by_head);
  reduction_into(g, CUDNN_REDUCE_TENSOR_ADD, by_head, gradient);
}

static void describe_backward(Graph *g, const PlanKey *k) {
  const cudnnDataType_t f32 = CUDNN_DATA_FLOAT, bf16 = CUDNN_DATA_BFLOAT16;
  Layout q_layout = heads_layout(k->batch, k->heads, k->tokens, k->head_dim, k->qkv_row);
  Layout kv_layout = heads_layout(k->batch, k->key_value_heads, k->tokens, k->head_dim, k->qkv_row);
  Layout out_layout = heads_layout(k->batch, k->heads, k->tokens, k->head_dim, k->out_row);
  Layout dout_layout = heads_layout(k->batch, k->heads, k->tokens, k->head_dim, k->dout_row);
  Layout dq_layout = heads_layout(k->batch, k->heads, k->tokens, k->head_dim, k->dqkv_row);
  Layout square = packed_layout(k->batch, k->heads, k->tokens, k->tokens);
  Layout one_column = packed_layout(k->batch, k->heads, k->tokens, 1);
  Layout packed_heads = packed_layout(k->batch, k->heads, k->tokens, k->head_dim);

  Node q = tensor(g, IN_MEMORY, TENSOR_Q, bf16, q_layout);
  Node keys = tensor(g, IN_MEMORY, TENSOR_K, bf16, transposed(kv_layout));
  Node values = tensor(g, IN_MEMORY, TENSOR_V, bf16, transposed(kv_layout));
  Node out = tensor(g, IN_MEMORY, TENSOR_OUT, bf16, out_layout);
  Node dout = tensor(g, IN_MEMORY, TENSOR_DOUT, bf16, dout_layout);
  Node lse = tensor(g, IN_MEMORY, TENSOR_LSE, f32, one_column);
  Node scale = number(g, TENSOR_SCALE);

  // delta = rowsum(dout * out). The factor 1 stands where a dropout's would: the pattern has it.
  Node delta = tensor(g, IN_MEMORY, TENSOR_DELTA, f32, one_column);
  Node terms = pointwise(g, CUDNN_POINTWISE_MUL, dout, out, f32, packed_heads);
  Node row_sum = reduction(g, CUDNN_REDUCE_TENSOR_ADD, terms, one_column);
  pointwise_into(
      g, (Pointwise){.mode = CUDNN_POINTWISE_MUL, .math = f32, .x = row_sum, .b = number(g, TENSOR_ONE)},
      delta);

  Node s = matmul(g, q, keys, square);
  s = pointwise(g, CUDNN_POINTWISE_MUL, s, scale, f32, square);
  s = pointwise(g, CUDNN_POINTWISE_SUB, s, lse, f32, square);
  s = causal(g, s, square);
  Node p = pointwise(g, CUDNN_POINTWISE_EXP, s, NULL, f32, square);
  key_gradient(g, k, p, dout, TENSOR_DV);

  Node ds = matmul(g, dout, values, square);
  ds = pointwise(g, CUDNN_POINTWISE_SUB, ds, delta, f32, square);
  ds = pointwise(g, CUDNN_POINTWISE_MUL, ds, p, f32, square);
  ds = pointwise(g, CUDNN_POINTWISE_MUL, ds, scale, f32, square);
  key_gradient(g, k, ds, q, TENSOR_DK);

  Node upright = reshape(g, keys, bf16, kv_layout);
  Node dq = tensor(g, IN_MEMORY, TENSOR_DQ, bf16, dq_layout);
  Node dq_sum = tensor(g, IN_MEMORY, TENSOR_DQ_SUM, f32, packed_heads);
  matmul_into(g, ds, upright, dq_sum);
  pointwise_into(g, (Pointwise){.mode = CUDNN_POINTWISE_IDENTITY, .math = f32, .x = dq_sum}, dq);
}

// --- plans -------------------------------------------------------------------------------------------------

typedef struct {
  PlanKey key;
  Node plan; // NULL when cuDNN has none for this shape
  int64_t workspace;
} Plan;

enum { PLANS = 32, ENGINES = 8 };

static cudnnHandle_t handle;
static Plan plans[PLANS];
static int plans_made;

// The first of the engines that cuDNN's heuristic proposes which takes the graph.
static void choose_engine(Graph *g, Plan *plan) {
  Node operations = make(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  set(g, operations, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->operation_count,
      g->operations);
  set(g, operations, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
  finish(g, operations);
  Node heuristic = make(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
  set_node(g, heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, operations);
  set(g, heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
  finish(g, heuristic);
  Node engines[ENGINES];
  for (int i = 0; i < ENGINES; i++) engines[i] = make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  int64_t count = 0, one_value;
  if (g->status == CUDNN_STATUS_SUCCESS)
    g->status = cudnnBackendGetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                         CUDNN_TYPE_BACKEND_DESCRIPTOR, ENGINES, &count, engines);
  for (int64_t i = 0; i < count && g->status == CUDNN_STATUS_SUCCESS && !plan->plan; i++) {
    Graph attempt = {.status = CUDNN_STATUS_SUCCESS};
    Node node = make(&attempt, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    set_node(&attempt, node, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, engines[i]);
    set(&attempt, node, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    finish(&attempt, node);
    if (attempt.status == CUDNN_STATUS_SUCCESS)
      attempt.status = cudnnBackendGetAttribute(node, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                                CUDNN_TYPE_INT64, 1, &one_value, &plan->workspace);
    if (attempt.status == CUDNN_STATUS_SUCCESS)
      plan->plan = node;
    else
      release(&attempt);
  }
}

// The plan for this shape, made at its first use. Shapes beyond the table's size push out the oldest.
static const Plan *plan_for(const PlanKey *key) {
  for (int i = 0; i < plans_made && i < PLANS; i++)
    if (memcmp(&plans[i].key, key, sizeof *key) == 0) return &plans[i];
  Plan *plan = &plans[plans_made++ % PLANS];
  if (plan->plan) cudnnBackendDestroyDescriptor(plan->plan);
  memset(plan, 0, sizeof *plan);
  plan->key = *key;
  Graph graph = {.status = CUDNN_STATUS_SUCCESS, .next_virtual = FIRST_VIRTUAL};
  if (key->backward)
    describe_backward(&graph, key);
  else
    describe_forward(&graph, key);
  choose_engine(&graph, plan);
  release(&graph);
  return plan;
}

// --- running -----------------------------------------------------------------------------------------------

// Pointers by tensor id, as a run of a plan takes them.
typedef struct {
  int64_t ids[24];
  void *pointers[24];
  int count;
} Pack;

static void pack_add(Pack *pack, int64_t id, const void *pointer) {
  pack->ids[pack->count] = id;
  pack->pointers[pack->count++] = (void *)(uintptr_t)pointer;
}

static const void *column(Tensor t, int64_t first) {
  return (const char *)t.data + (size_t)first * dtype_bytes(t.dtype);
}

static bool run(const Plan *plan, Pack *pack, void *workspace) {
  Graph g = {.status = CUDNN_STATUS_SUCCESS};
  Node node = make(&g, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  set(&g, node, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pack->count, pack->pointers);
  set(&g, node, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, pack->count, pack->ids);
  set(&g, node, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
  finish(&g, node);
  if (g.status == CUDNN_STATUS_SUCCESS) g.status = cudnnBackendExecute(handle, plan->plan, node);
  release(&g);
  return g.status == CUDNN_STATUS_SUCCESS;
}

static bool ready(Tensor qkv, Tensor lse, AttentionShape s, cudaStream_t stream, const char **reason) {
  *reason = attention_cudnn_absent();
  if (*reason) return false;
  *reason = "it takes bf16 only";
  if (qkv.dtype != DTYPE_BF16) return false;
  *reason = "it takes head sizes that are multiples of 8, up to 128";
  if (s.head_dim % 8 || s.head_dim > 128) return false;
  *reason = "it takes a dense lse only";
  if (!tensor_is_dense(lse)) return false;
  *reason = "it could not be started";
  if (!handle && cudnnCreate(&handle) != CUDNN_STATUS_SUCCESS) return false;
  return cudnnSetStream(handle, stream) == CUDNN_STATUS_SUCCESS;
}

static PlanKey key_of(AttentionShape s, Tensor qkv, Tensor out) {
  PlanKey key;
  memset(&key, 0, sizeof key);
  key.batch = s.batch, key.tokens = s.seq_len, key.head_dim = s.head_dim;
  key.heads = s.num_heads, key.key_value_heads = s.num_key_value_heads;
  key.qkv_row = qkv.stride, key.out_row = out.stride;
  return key;
}

static const float masked_score = -INFINITY, one = 1;

bool attention_cudnn_forward(const AttentionForward *a, cudaStream_t stream, const char **reason) {
  AttentionShape s = a->shape;
  if (!ready(a->qkv, a->lse, s, stream, reason)) return false;
  PlanKey key = key_of(s, a->qkv, a->out);
  const Plan *plan = plan_for(&key);
  *reason = "it has no forward engine for this shape";
  if (!plan->plan) return false;
  *reason = "its forward pass needs more workspace than was set aside";
  if ((size_t)plan->workspace > tensor_bytes(a->workspace)) return false;

  float scale = 1 / sqrtf((float)s.head_dim);
  Pack pack = {.count = 0};
  pack_add(&pack, TENSOR_Q, a->qkv.data);
  pack_add(&pack, TENSOR_K, column(a->qkv, s.num_heads * s.head_dim));
  pack_add(&pack, TENSOR_V, column(a->qkv, (s.num_heads + s.num_key_value_heads) * s.head_dim));
  pack_add(&pack, TENSOR_OUT, a->out.data);
  pack_add(&pack, TENSOR_LSE, a->lse.data);
  pack_add(&pack, TENSOR_SCALE, &scale);
  pack_add(&pack, TENSOR_MASKED, &masked_score);
  *reason = "its forward pass failed to start";
  return run(plan, &pack, a->workspace.data);
}

// Batches [first, first + key->batch), and of these the heads that belong to key/value heads
// [first_head, first_head + key->key_value_heads).
bool attention_cudnn_backward(const AttentionBackward *a, cudaStream_t stream, const char **reason) {
  AttentionShape s = a->shape;
  if (!ready(a->qkv, a->lse, s, stream, reason)) return false;
  PlanKey key = key_of(s, a->qkv, a->out);
  key.backward = true, key.dqkv_row = a->dqkv.stride, key.dout_row = a->dout.stride;
  const Plan *plan = plan_for(&key);
  *reason = "it has no backward engine for this shape";
  if (!plan->plan) return false;
  AttentionWorkspace parts = cuda_attention_workspace(s, ATTENTION_CUDNN);
  *reason = "its backward pass needs more workspace than was set aside";
  if ((size_t)plan->workspace > parts.cudnn) return false;

  char *delta = a->workspace.data, *dq_sums = delta + parts.statistics + parts.counters;
  int64_t D = s.head_dim, k_column = s.num_heads * D, v_column = k_column + s.num_key_value_heads * D;
  float scale = 1 / sqrtf((float)D);
  Pack pack = {.count = 0};
  pack_add(&pack, TENSOR_Q, a->qkv.data);
  pack_add(&pack, TENSOR_K, column(a->qkv, k_column));
  pack_add(&pack, TENSOR_V, column(a->qkv, v_column));
  pack_add(&pack, TENSOR_OUT, a->out.data);
  pack_add(&pack, TENSOR_DOUT, a->dout.data);
  pack_add(&pack, TENSOR_LSE, a->lse.data);
  pack_add(&pack, TENSOR_DQ, a->dqkv.data);
  pack_add(&pack, TENSOR_DK, column(a->dqkv, k_column));
  pack_add(&pack, TENSOR_DV, column(a->dqkv, v_column));
  pack_add(&pack, TENSOR_DELTA, delta);
  pack_add(&pack, TENSOR_DQ_SUM, dq_sums);
  pack_add(&pack, TENSOR_SCALE, &scale);
  pack_add(&pack, TENSOR_MASKED, &masked_score);
  pack_add(&pack, TENSOR_ONE, &one);
  *reason = "its backward pass failed to start";
  return run(plan, &pack, dq_sums + parts.dq_sums);
}

#endif
