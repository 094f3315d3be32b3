/* SPDX-License-Identifier: Apache-2.0
 *
 * Experts in place of an MLP: each computes the rows that chose it, and reads its matrices only if there are any. */

/* A matrix of expert e, from those of all. */
static Matrix of_expert(Matrix all, int kind, int64_t e) {
  const int64_t entries = e * all.n * all.k, bytes = kind >= IN_INT4 ? entries / 2 : kind ? entries : 4 * entries;
  all.w = (const char *)all.w + bytes;
  if (all.scale) all.scale += e * all.n * all.groups;
  if (all.zero) all.zero += e * all.n * all.groups;
  if (all.bias) all.bias += e * all.n;
  return all;
}

/* x (G*L, D), the experts that tokens chose (G, k*L), all first choices of a group's tokens before all second ones, then the
 * experts' parameters in the order of use, and the plan -> (G, k*L, D). */
int experts(int count, void **p, int *dims, int64_t **shapes, const char **types, void *stream, void *extra) {
  const int32_t *plan = p[count - 2], *chosen = p[1];
  const float *x = p[0];
  const int64_t d = shapes[0][1], groups = shapes[1][0], rows = groups * shapes[1][1], length = shapes[0][0] / groups;
  const int64_t num_experts = shapes[2][0], f = shapes[2][1];
  const int kind = plan[WEIGHTS];
  Inputs in = {p, shapes, plan, 2, 0};
  const Matrix up = next_matrix(&in, 1, plan[MLP_BIAS]);
  const Matrix gate = plan[GATED] ? next_matrix(&in, 1, plan[MLP_BIAS]) : up, down = next_matrix(&in, 1, plan[MLP_BIAS]);
  float *y = p[count - 1], *own = aligned_alloc(LINE, rows * 2 * (d + f) * sizeof(float));
  int64_t *which = malloc(rows * sizeof *which);
  int failed = !own || !which;
  float *result = own + rows * d, *wide = result + rows * d;
  for (int64_t e = 0; !failed && e < num_experts; ++e) {
    int64_t m = 0;
    for (int64_t i = 0; i < rows; ++i)
      if (chosen[i] == e) {
        memcpy(own + m * d, x + (i / shapes[1][1] * length + i % length) * d, d * sizeof(float));
        which[m++] = i;
      }
    if (!m) continue;
    const Features with = {wide, plan[GATED] ? wide + m * f : NULL, plan[ACTIVATION]};
    failed |= times(of_expert(up, kind, e), kind, own, wide, m);
    if (with.gate) failed |= times(of_expert(gate, kind, e), kind, own, with.gate, m);
    in_parallel(activate, &with, m * f / LANES, m * f * 16);
    failed |= times(of_expert(down, kind, e), kind, wide, result, m);
    for (int64_t i = 0; i < m; ++i) memcpy(y + which[i] * d, result + i * d, d * sizeof(float));
  }
  free(which);
  free(own);
  return failed;
}
