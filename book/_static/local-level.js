/* The local level model in plain JavaScript: filter, log-likelihood, and everything that one pass
   backwards gives. tests/book/test_local_level.py holds it against helpers.kalman. */

/* y: numbers, null for a gap; model: {a0, P0, H, Q}. */
function localLevel(y, { a0, P0, H, Q }) {
  const n = y.length;
  const a = [], P = [], u = [], K = [], filtered = [], variance = [];
  let loglik = 0, mean = a0, spread = P0;
  for (let t = 0; t < n; t++) {
    a.push(mean);
    P.push(spread);
    u.push(0);
    K.push(0);
    if (y[t] !== null) {
      const F = spread + H, v = y[t] - mean;
      u[t] = v / F;
      K[t] = spread / F;
      loglik -= (Math.log(2 * Math.PI * F) + v * u[t]) / 2;
      mean += K[t] * v;
      spread -= K[t] * spread;
    }
    filtered.push(mean);
    variance.push(spread);
    spread += Q;
  }

  /* Backwards: a_bar and P_bar are the derivatives of loglik for the predicted mean and variance. */
  const score = { H: 0, Q: 0 }, adjoint = new Array(n), smoothed = new Array(n);
  let aBar = 0, PBar = 0;
  for (let t = n - 1; t >= 0; t--) {
    score.Q += PBar;
    if (y[t] !== null) {
      const own = (u[t] * u[t] - 1 / (P[t] + H)) / 2, left = 1 - K[t];
      score.H += own - K[t] * u[t] * aBar + K[t] * K[t] * PBar;
      PBar = own + left * u[t] * aBar + left * left * PBar;
      aBar = u[t] + left * aBar;
    }
    adjoint[t] = aBar;
    smoothed[t] = a[t] + P[t] * aBar; /* the smoother: the adjoint of the mean, weighted */
  }
  return { loglik, score, predicted: a, spread: P, filtered, variance, adjoint, smoothed };
}
