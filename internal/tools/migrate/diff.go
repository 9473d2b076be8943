package migrate

import (
	"fmt"
	"strings"
)

// around is how many unchanged lines a diff shows around a change.
const around = 3

// Diff is the change from a to b in the unified format, "" if there is none.
func Diff(nameA, nameB, a, b string) string {
	var steps []step
	docsA, docsB := split(a), split(b)
	if len(docsA) != len(docsB) {
		docsA, docsB = []string{a}, []string{b}
	}
	for i := range docsA { // each on its own: what is aligned costs the product of the lengths
		steps = append(steps, align(linesOf(docsA[i]), linesOf(docsB[i]))...)
	}
	var out strings.Builder
	for at := 0; ; {
		from, to := hunk(steps, at)
		if from == to {
			break
		}
		if out.Len() == 0 {
			fmt.Fprintf(&out, "--- %s\n+++ %s\n", nameA, nameB)
		}
		writeHunk(&out, steps, from, to)
		at = to
	}
	return out.String()
}

func linesOf(s string) []string {
	lines := strings.SplitAfter(s, "\n")
	if last := len(lines) - 1; lines[last] == "" {
		lines = lines[:last]
	}
	return lines
}

// maxCells bounds the memory of align, to 128 MiB.
const maxCells = 32 << 20

// step is a line that is in both (' '), in a only ('-') or in b only ('+').
type step struct {
	sign byte
	line string
}

// align is a shortest way from a to b.
func align(a, b []string) []step {
	var head, tail []step
	for len(a) > 0 && len(b) > 0 && a[0] == b[0] {
		head = append(head, step{' ', a[0]})
		a, b = a[1:], b[1:]
	}
	for len(a) > 0 && len(b) > 0 && a[len(a)-1] == b[len(b)-1] {
		tail = append([]step{{' ', a[len(a)-1]}}, tail...)
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	head = append(head, between(a, b)...)
	return append(head, tail...)
}

// between is align of two texts that differ at both ends.
func between(a, b []string) (steps []step) {
	if (len(a)+1)*(len(b)+1) > maxCells {
		for _, line := range a {
			steps = append(steps, step{'-', line})
		}
		for _, line := range b {
			steps = append(steps, step{'+', line})
		}
		return steps
	}
	common := make([][]int32, len(a)+1) // common[i][j]: lines that a[i:] and b[j:] share
	for i := range common {
		common[i] = make([]int32, len(b)+1)
	}
	for i := len(a) - 1; i >= 0; i-- {
		for j := len(b) - 1; j >= 0; j-- {
			if a[i] == b[j] {
				common[i][j] = common[i+1][j+1] + 1
			} else {
				common[i][j] = max(common[i+1][j], common[i][j+1])
			}
		}
	}
	for i, j := 0, 0; i < len(a) || j < len(b); {
		switch {
		case i < len(a) && j < len(b) && a[i] == b[j]:
			steps = append(steps, step{' ', a[i]})
			i, j = i+1, j+1
		case j == len(b) || i < len(a) && common[i+1][j] >= common[i][j+1]:
			steps = append(steps, step{'-', a[i]})
			i++
		default:
			steps = append(steps, step{'+', b[j]})
			j++
		}
	}
	return steps
}

// hunk is the next range of steps from at on that belongs together; it is empty at the end.
func hunk(steps []step, at int) (from, to int) {
	for at < len(steps) && steps[at].sign == ' ' {
		at++
	}
	if at == len(steps) {
		return at, at
	}
	from, to = max(0, at-around), at
	for i := at; i < len(steps) && i <= to+2*around; i++ {
		if steps[i].sign != ' ' {
			to = i + 1
		}
	}
	return from, min(len(steps), to+around)
}

func writeHunk(out *strings.Builder, steps []step, from, to int) {
	lineA, lineB, countA, countB := 1, 1, 0, 0
	for i, s := range steps[:to] {
		a, b := &lineA, &lineB
		if i >= from {
			a, b = &countA, &countB
		}
		if s.sign != '+' {
			*a++
		}
		if s.sign != '-' {
			*b++
		}
	}
	if countA == 0 {
		lineA--
	}
	if countB == 0 {
		lineB--
	}
	fmt.Fprintf(out, "@@ -%d,%d +%d,%d @@\n", lineA, countA, lineB, countB)
	for _, s := range steps[from:to] {
		switch {
		case strings.HasSuffix(s.line, "\n"):
			fmt.Fprintf(out, "%c%s", s.sign, s.line)
		default:
			fmt.Fprintf(out, "%c%s\n\\ No newline at end of file\n", s.sign, s.line)
		}
	}
}
