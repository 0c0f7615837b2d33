"""Plant faults in the compiled half, one at a time, and see a unit test catch each.

``python -m tools.plant`` copies the sources, changes one place, and runs the tests of the checked
Python twin (no compiler) against the copy, a few seconds each. It fails if a fault goes unseen.
``python -m tools.plant joseph`` plants those whose name contains a word.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# name: (file, what stands there, what is planted)
FAULTS = {
    "tangents: what a gap misses moves": (
        "push.py",
        "            clear(w, below(d.Z, i), 1)\n",
        "",
    ),
    "tangents: settled as soon as P is": (
        "push.py",
        "            steady = is_steady(d_now, d_before, waited, LATER * tol) and steady\n",
        "",
    ),
    "tangents: those that fade have to settle to a part of what they have become": (
        "push.py",
        "scale = max(largest, most / float(n) ** 2)",
        "scale = largest",
    ),
    "tangents: those that fade settle while n steps of them would count": (
        "push.py",
        "scale = max(largest, most / float(n) ** 2)",
        "scale = max(largest, most)",
    ),
    "tangents: a direction along which a known state becomes unknown settles": (
        "push.py",
        "                    return 1.0\n",
        "                    moves = moves\n",
    ),
    "tangents: what F's factor moves by taken for that of F": (
        "push.py",
        "        product(w, d.G, 1.0, s.C_inv, d.Q, d.zero, p, p, mk)\n",
        "        product(w, d.G, 1.0, d.C_inv_t, d.Q, d.zero, p, p, mk)\n",
    ),
    "tangents: N after a stretch of steady state forgotten": (
        "pull.py",
        "    add_power(w, x, steps, s.X2, d.work, dN, k)\n",
        "",
    ),
    "tangents: the gains of a stretch without an end only at its first step": (
        "pull.py",
        "                spread(w, group_of(x, i), gain, t + 1, kept)\n",
        "                pass\n",
    ),
    "tangents: T's direction not turned on the way back": (
        "pull.py",
        "columns_from(below(d.T_t, left), top, k), below(d.U, left)",
        "columns_from(below(d.T, left), top, k), below(d.U, left)",
    ),
    "tangents: what few rows of T do to P left out": (
        "push.py",
        "            from_right(w, out, 1.0, dT_P, s.T_t, out, rows, m, m, k)\n",
        "",
    ),
    "tangents: a symmetric product not mirrored, alone": (
        "directions.py",
        "        symmetrize(w, out, size)\n",
        "",
    ),
    "tangents: a symmetric product not mirrored, side by side": (
        "directions.py",
        "axpy(w, out.at + j * out.ld + i * k, 1.0, out.at + i * out.ld + j * k, zero, k)",
        "pass",
    ),
    "tangents: T's last moving row left out": (
        "directions.py",
        "min(top, i), max(bottom, i + 1)",
        "min(top, i), max(bottom, i, 1)",
    ),
    "tangents: the wanted columns of T's gradient begin within a vector": (
        "directions.py",
        "left // LANES * LANES, right)",
        "left, right)",
    ),
    "tangents: rows below those of T that move forgotten": (
        "push.py",
        "    copy(w, below(dTP, bottom), below(d.half, bottom), m - bottom)\n",
        "",
    ),
    "tangents: weights that differ left out of the gain's share": (
        "pull.py",
        "        add(w, d.Z_bar, -g * steps, dKf, p)\n",
        "        add(w, d.Z_bar, -steps, dKf, p)\n",
    ),
    "tangents: sums not begun anew where arrays vary": (
        "pull.py",
        "        clear(w, d.T_bar, m)\n    if want_Z:",
        "    if want_Z:",
    ),
    "tangents: every group takes the directions of the first": (
        "push.py",
        "load_directions(w, group_of(x, i), t, dots, observed, groups[i])",
        "load_directions(w, group_of(x, i), t, dots, observed, groups[0])",
    ),
    "tangents: half of F's, where it is a number": (
        "push.py",
        "axpy(w, d.F.at, 2.0, d.H.at, d.zero.at, k)",
        "axpy(w, d.F.at, 1.0, d.H.at, d.zero.at, k)",
    ),
    "tangents: of the gain's two shares in P one, alone": (
        "push.py",
        "product(w, d.P_filt, -1.0, transposed(d.Q), Kf, d.P_filt, m, p, m)",
        "pass",
    ),
    "tangents: of the gain's two shares in P one, side by side": (
        "push.py",
        "add_outer_from_left(w, d.P_filt, -1.0, d.Q, Kf.at, m, m, k)",
        "pass",
    ),
    "tangents: half of D's, where it is a number": (
        "pull.py",
        "add_times_rows(w, d.D, 2.0, d.Y, s.K, 1, m, k)",
        "add_times_rows(w, d.D, 1.0, d.Y, s.K, 1, m, k)",
    ),
    "tangents: N's twice, where T is dense": (
        "pull.py",
        "product(w, d.half, 1.0, s.T_t, dN, d.zero, m, m, mk)",
        "product(w, d.half, 2.0, s.T_t, dN, d.zero, m, m, mk)",
    ),
    "tangents: what T's direction makes of a left out where gains have settled": (
        "push.py",
        "add_moved_by_T(w, da_next, below(s.a, first), d.T_t, steps, m, group)",
        "pass",
    ),
    "tangents: what the gain moves by left out where gains have settled": (
        "push.py",
        "product(w, da_next, 1.0, below(s.v, first), d.K, dc, steps, p, m * k)",
        "product(w, da_next, 0.0, below(s.v, first), d.K, dc, steps, p, m * k)",
    ),
    "intercepts that vary: those of the first step at every step": (
        "forward.py",
        "        if t == 0 or moving:\n",
        "        if t == 0:\n",
    ),
    "intercepts that vary: a step late where the covariance is steady": (
        "forward.py",
        "load(w, c, model.c[k:end], end - k, m)",
        "load(w, c, model.c[k - 1 : end - 1], end - k, m)",
    ),
    "tangents: c's of the first step at every step": (
        "push.py",
        "    if dots.c.shape[1] > 1:\n"
        "        load_moves(w, as_column(d.c, group.k), dots.c, t, group, False)\n",
        "",
    ),
    "tangents: of dv what da makes of it left out where gains have settled": (
        "push.py",
        "    from_right(w, dv, -1.0, da, s.Z_t, dv, steps, m, p, k)\n",
        "",
    ),
    "tangents: what T's direction makes of r left out where gains have settled": (
        "pull.py",
        "product(w, dr, 1.0, columns_from(r_next, top, 1), below(d.T, top), dr, steps, rows, mk)",
        "pass",
    ),
    "tangents: what the gain moves by left out of e where gains have settled": (
        "pull.py",
        "product(w, de, -1.0, r_next, d.K_t, below(d.u, gain), steps, m, p * k)",
        "product(w, de, 0.0, r_next, d.K_t, below(d.u, gain), steps, m, p * k)",
    ),
    "tangents: the sums over time of c's and d's not begun anew": (
        "pull.py",
        "        clear(w, total, 1)\n",
        "",
    ),
    "few states: a gap does not end a steady state": (
        "small.py",
        "until, steady = same_until[t], False",
        "until, steady = n, False",
    ),
    "few states: N left as it is, though gains change": (
        "small.py",
        "            steady, since, before, looked = False, t, (0.0, 0.0, before[2]), t\n",
        "",
    ),
    "few states: the gain of every step kept at the place of the first": (
        "small.py",
        "kept.gain, t * of_gain)",
        "kept.gain, 0 * of_gain)",
    ),
    "few states: T's gradient though nobody wants it": (
        "small.py",
        "            if wanted.T:\n",
        "            if True:\n",
    ),
    "few states: the weight left out of P0's gradient": (
        "small.py",
        "write(weight * ((recursions.outer(r, r) - N) / 2), out.P0.w, 0)",
        "write((recursions.outer(r, r) - N) / 2, out.P0.w, 0)",
    ),
    "few states: what is vague at the last step let through": (
        "small.py",
        "shortfall(P_filt if t == n - 1 else P_next, share, most)",
        "shortfall(P_next, share, most)",
    ),
    "few states: sums of intercepts not begun anew where they vary": (
        "small.py",
        "            c_sum, d_sum = no_x, no_z\n",
        "",
    ),
    "few states: sums not begun anew where arrays vary": (
        "small.py",
        "            T_sum, Z_sum, H_sum, W_sum = no_m, like.Z, no_p, no_m\n",
        "",
    ),
    "tangents: what the inverse of F moves by twice": (
        "../tangents.py",
        "Moving(C_inv, -(dE @ C_inv) / 2)",
        "Moving(C_inv, -(dE @ C_inv))",
    ),
    "tangents: a product whose second factor stays as it is": (
        "../tangents.py",
        "            moved = moved + self.X @ other.dX\n",
        "            pass\n",
    ),
    "few states: a steady state though tangents go on": (
        "small.py",
        "    return of_tangent and is_steady(",
        "    return is_steady(",
    ),
    "few states: a change of tangents where there is no variance overlooked": (
        "small.py",
        "larger(where_positive(none, 1.0), moves)",
        "moves",
    ),
    "few states: of a direction's fading nothing remembered": (
        "small.py",
        "    most = larger(now, most)\n",
        "",
    ),
    "a vague start in a lag left unwatched": (
        "../square_root.py",
        "return noise == 0.0 or LOST * own <= scale * noise",
        "return True",
    ),
    "what a lag repeats reaches it in full": (
        "../square_root.py",
        "        scale *= T[0, i, following] * T[0, i, following]\n",
        "",
    ),
    "outputs: numbers after a negative F": (
        "steps.py",
        "            out.l[t:] = np.nan\n",
        "",
    ),
    "outputs: F of what is missing": (
        "steps.py",
        "= F if here and observed.entries[t, j] else 0.0",
        "= F",
    ),
    "outputs: the update of the step before": (
        "steps.py",
        "store_symmetric(w, s.P_filt, out.P_filt[t])",
        "store_symmetric(w, P, out.P_filt[t])",
    ),
    "room for a matrix without its last columns": (
        "layout.py",
        "at += padded(rows * ld)",
        "at += padded(rows * ld - LANES)",
    ),
    "gains kept for one series only": (
        "layout.py",
        "gains * p + LANES",
        "gains + LANES",
    ),
    "Joseph's form ruled out by one series where there are several": (
        "step.py",
        "return sizes(w).p == 1 and",
        "return sizes(w).p > 0 and",
    ),
    "lopsided covariances left alone": (
        "writing.py",
        '                self.line(f"symmetrize(w, {out.at}, m)")\n',
        '                self.line("pass")\n',
    ),
    "Joseph's form never used": (
        "step.py",
        'and shrinks(w, P, s.P_filt, JOSEPH_BELOW, m)"',
        'and False"',
    ),
    "what is added after the products left out": (
        "writing.py",
        "        for factor, A in refs:\n            name, more",
        "        for factor, A in []:\n            name, more",
    ),
    "steady without the geometric tail": (
        "forward.py",
        "now * rate / (1.0 - rate) <= tol",
        "now <= tol",
    ),
    "rows of padding not cleared": (
        "one_pass.py",
        "for k in range(HEADER, s.a.at + s.a.ld):",
        "for k in range(HEADER, s.a.at):",
    ),
    "workspace not cleared": ("one_pass.py", "    clean(w)\n", ""),
    "a wrong block mirrored": (
        "tiles.py",
        "_transposed_block(w, A.at + j * A.ld + i, A.ld, A.at + i * A.ld + j, A.ld)",
        "_transposed_block(w, A.at + i * A.ld + j, A.ld, A.at + j * A.ld + i, A.ld)",
    ),
    "a wide tile where a narrow one is left": (
        "tiles.py",
        "    while j + LANES < cols:\n        left",
        "    while j < cols:\n        left",
    ),
    "of half a product three vectors wide the second block left out": (
        "tiles.py",
        "_wide(w, out, alpha, A, B, C, j, first, min(first + LANES, rows), inner)",
        "pass",
    ),
    "a product that leaves out its last row": (
        "tiles.py",
        "        while i < rows:\n            a, o, c =",
        "        while i < rows - 1:\n            a, o, c =",
    ),
    "the last inner term left out": (
        "tiles.py",
        "for q in index[start[i] : start[i + 1]]:",
        "for q in index[start[i] : start[i + 1] - 1]:",
    ),
    "a row on the diagonal left out of a lower half": (
        "tiles.py",
        "k = max(first, j) if lower else first",
        "k = max(first, j + 1) if lower else first",
    ),
    "a lower half without its first rows": (
        "tiles.py",
        "            _narrow(w, out, alpha, A, B, C, j, j, first, inner)\n",
        "",
    ),
    "a lower half without a row of its second vector": (
        "tiles.py",
        "            first = min(j + LANES, rows)\n",
        "            first = min(j + LANES + 1, rows)\n",
    ),
    "the first rows transposed in place of later ones": (
        "tiles.py",
        "    for i in range(first, stop, LANES):\n",
        "    for i in range(0, stop - first, LANES):\n",
    ),
    "how far P moved, in the units of one state alone": (
        "forward.py",
        "        largest = max(largest, of_row * get(w, s.row.at + i))\n",
        "        largest = max(largest, of_row)\n",
    ),
    "x'y without y'x": (
        "tiles.py",
        "for a, b in [(x, y), (y, x)][:terms]:",
        "for a, b in [(x, y), (y, x)][:1]:",
    ),
    "a gap counted as an observation": (
        "step.py",
        "        count += there\n",
        "        count += 1.0\n",
    ),
    "the last gap ignored": (
        "inputs.py",
        "same = t < n - 1\n",
        "same = t < n - 1\n        if t == n - 2:\n            observed.entries[t + 1] = 1\n",
    ),
    "a gap does not end a steady state": (
        "inputs.py",
        "observed.same_until[t + 1] if same else t + 1",
        "n",
    ),
    "the gain from F^-1 of the step before": (
        "forward.py",
        "Kf, F_inv = below(s.Kf, gain * p), below(s.F_inv, gain * p)\n        kept",
        "Kf, F_inv = below(s.Kf, gain * p), below(s.F_inv, max(gain - 1, 0) * p)\n        kept",
    ),
    "T P instead of T P_filt where P_filt is not written": (
        "writing.py",
        'found.change = f"{rest[0][0]}, {rest[0][2].at}.at"',
        'found.change = f"0.0, {rest[0][2].at}.at"',
    ),
    "a product by lists without the update": (
        "tiles.py",
        "b += w.read(x + q)[0] * (alpha * w.read(x + j, width))",
        "b += 0.0",
    ),
    "P_filt not written where it is needed": (
        "step.py",
        'e.only("needed or not keeps_variances(w, F_inv)")',
        'e.only("needed")',
    ),
    "the N before a steady state left out of the sum": (
        "backward.py",
        "            if is_summed(t, varying, wanted, steady_from):\n",
        "            if False:\n",
    ),
    "the N of the first step counted twice": (
        "backward.py",
        "and not varying and t >= 0 and steady_from[t] < 0",
        "and not varying and (t < 0 or steady_from[t] < 0)",
    ),
    "the N after a steady state counted twice": (
        "backward.py",
        "and not varying and t >= 0 and steady_from[t] < 0",
        "and not varying and t >= 0",
    ),
    "columns: handed over in their order, not to their places": (
        "backward.py",
        "out[i, columns[j]] +=",
        "out[i, j] +=",
    ),
    "columns: what is kept are the first ones": (
        "forward.py",
        "get(w, row + columns[j])",
        "get(w, row + j)",
    ),
    "columns: the gain of the first ones": (
        "tiles.py",
        "alpha * get(w, row + columns[j])",
        "alpha * get(w, row + j)",
    ),
    "roots: the means of the columns asked for left out": (
        "../square_root.py",
        "    P_s[columns] = Bs @ step.Bf_t\n",
        "",
    ),
    "roots: an entry of T left out of its list": (
        "../square_root.py",
        "        start[i + 1] = k\n",
        "        start[i + 1] = max(k - 1, start[i])\n",
    ),
    "weights taken for equal": ("one_pass.py", "if x[t] != x[0]:", "if False:"),
    "no entry listed for a row of zeros": (
        "inputs.py",
        "if count == found.start[i]:",
        "if False:",
    ),
    "N of the later steps forgotten": (
        "backward.py",
        "if end < sizes(w).n:",
        "if end < 0:",
    ),
    "the sums of N one step off": (
        "backward.py",
        "add(w, totals, size, total, m)",
        "add(w, totals, size + 1.0, total, m)",
    ),
    "a rate taken from a change of any size": (
        "forward.py",
        "if not 0.0 < before < TELLING:",
        "if not 0.0 < before:",
    ),
    "a change in units of the later variance alone": (
        "forward.py",
        "x = max(element(w, P, i, i), element(w, P_next, i, i))",
        "x = element(w, P_next, i, i)",
    ),
    "few states: a change in units of the later variances alone": (
        "small.py",
        "    x = larger(diagonal(still(P)), diagonal(still(P_next)))\n",
        "    x = diagonal(still(P_next))\n",
    ),
    "a vague start not noticed": (
        "forward.py",
        "if watch and shows_vague(w, P_next, model):",
        "if False:",
    ),
    "a known start watched": (
        "forward.py",
        " and not was_known(model.P0, model.W[0])",
        "",
    ),
    "states that repeat others watched": (
        "forward.py",
        "return not is_past(i, model.P0, model.T, model.W) and ",
        "return ",
    ),
    "few states: those that repeat others watched": (
        "../square_root.py",
        "0.0 if known or is_past(i, P0, T, W) else LOST",
        "0.0 if known else LOST",
    ),
    "a circle of states taken for past": (
        "../square_root.py",
        "    return False  # a circle",
        "    return True",
    ),
    "a state with two others that have no noise taken for past": (
        "../square_root.py",
        "elif following >= 0:",
        "elif False:",
    ),
    "a vague state followed as if it had noise": (
        "../square_root.py",
        "                if W[0, j, j] > LOST * P0[j, j]:",
        "                if W[0, j, j] > 0.0:",
    ),
    "what is not wanted is added": (
        "backward.py",
        "            if wanted.W:\n                accumulate_W(w, first, n,",
        "            if True:\n                accumulate_W(w, first, n,",
    ),
    "rotation: a gap takes its column of H^-1/2 along": (
        "collapse.py",
        "            orthonormalize(V, A, q + m, along)\n",
        "            V[:q] = 0.0\n            orthonormalize(V, A, q + m, along)\n",
    ),
    "rotation: the determinant of H whatever is missing": (
        "collapse.py",
        "                logdet += 2.0 * np.log(A[j, j])  # eq-hundred-gaps\n",
        "                pass\n",
    ),
    "rotation: x* by the first projection alone": (
        "collapse.py",
        "            along[j] += x\n",
        "            along[j] = x\n",
    ),
    "rotation: weights left out of what does not see the state": (
        "collapse.py",
        "add(y_bar, t, -g[t], x.z, place)",
        "add(y_bar, t, -1.0, x.z, place)",
    ),
    "rotation: the mixed term of H forgotten": (
        "collapse.py",
        "                    add(right, at + j, -Y_bar[t, j], x.z, place)\n",
        "",
    ),
    "rotation: the patterns of the first blocks forgotten": (
        "collapse.py",
        "            if last == count or not fixed:\n",
        "            if first == 0 or not fixed:\n",
    ),
    "rotation: h without its weight": (
        "collapse.py",
        "right[i] = g[t] * x.x[place, i]",
        "right[i] = x.x[place, i]",
    ),
    "rotation: digits of H's gradient lost without a word": (
        "collapse.py",
        "return np.abs(rest).max() >= LEAST_LEFT * np.abs(whole).max()",
        "return True",
    ),
    "rows of B' taken for those of B": (
        "writing.py",
        "base.at if base.is_symmetric else base.twin or",
        "base.at if True else base.twin or",
    ),
    "a place given away before it was read for the last time": (
        "writing.py",
        "                if last[token] == i:\n",
        "                if last[token] >= i:\n",
    ),
    "the weight of a step left out of D": (
        "../recursions.py",
        "    D = g * (C_inv.T @ C_inv)",
        "    D = (C_inv.T @ C_inv)",
    ),
    "weights that differ: the gain's share of Z with weight one": (
        "../recursions.py",
        "KTN @ TP - g * Kf.T",
        "KTN @ TP - Kf.T",
    ),
    "P0's gradient twice too large": (
        "backward.py",
        "out.P0[i, j] = 0.5 * weight * x",
        "out.P0[i, j] = weight * x",
    ),
}


# The tests that look at a file, where they are not those of the twin.
TESTS = {"collapse.py": ("test_kalman_collapse.py", "-k", "python or patterns or sizes")}


def plant(name: str) -> tuple[bool, float, str]:
    """Whether a test fails with this fault in place, the seconds that took, and which one."""
    file, there, planted = FAULTS[name]
    tests, *chosen = TESTS.get(file, ("test_kalman_twin.py",))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for part in ("src", "tests"):
            shutil.copytree(
                ROOT / part,
                f"{folder}/{part}",
                ignore=shutil.ignore_patterns("__pycache__", "data"),
            )
        path = Path(folder, "src/helpers/kalman/compiled", file)
        text = path.read_text()
        if text.count(there) != 1:
            raise ValueError(f"{name}: {there!r} stands {text.count(there)} times in {file}")
        path.write_text(text.replace(there, planted))
        paths = f"{folder}/src{os.pathsep}{folder}/tests{os.pathsep}{folder}"
        command = [
            sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider",
            "-c", os.devnull, "--rootdir", folder, f"{folder}/tests/{tests}", *chosen,
        ]  # fmt: skip
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
    seen = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    which = seen[0].split("::")[-1].split(" - ")[0] if seen else ""
    return done.returncode == 1 and bool(which), time.perf_counter() - start, which


def main() -> None:
    """Plant the faults that the command line names, all of them if it names none."""
    words = sys.argv[1:]
    unseen = []
    for name in FAULTS:
        if words and not any(word in name for word in words):
            continue
        caught, seconds, which = plant(name)
        print(f"{'caught' if caught else 'UNSEEN'} {seconds:5.1f} s  {name}: {which}", flush=True)
        if not caught:
            unseen.append(name)
    if unseen:
        sys.exit(f"{len(unseen)} faults went unseen")


if __name__ == "__main__":
    main()
