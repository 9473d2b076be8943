// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"testing"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

var heapAlloc = regexp.MustCompile(`(?m)^# HeapAlloc = (\d+)$`)

// heap returns the bytes in use of a process after a garbage collection.
func (p *process) heap() (bytes int64) {
	p.t.Helper()
	for range 3 { // the first collections also release what finalizers and pools still hold
		_, text := p.get("/debug/pprof/heap?debug=1&gc=1")
		found := heapAlloc.FindStringSubmatch(text)
		if found == nil {
			p.t.Fatal("the profile has no size of the heap")
		}
		bytes, _ = strconv.ParseInt(found[1], 10, 64)
	}
	return bytes
}

// TestIdleResizer: while no claim requests a change, the role adds no watch and no write to the other roles, and at
// most 3 MiB.
func TestIdleResizer(t *testing.T) {
	const claims, limit = 100, 3 << 20
	e := newEnv(t, resizable, 0)
	class := e.expandableClass()
	e.attributesClass("gold")
	first := e.run("provision", quick...)
	e.parallel(claims, func(i int) { e.claim(fmt.Sprintf("c%d", i), class) })
	for i := range claims {
		e.bound(fmt.Sprintf("c%d", i))
	}
	first.kill()

	const others = "provisioner,attacher"
	heaps, kinds := map[string]int64{}, map[string][]string{}
	for _, roles := range []string{others, others + ",resizer"} {
		mark := e.mark()
		p := e.run("all", "--http-endpoint=127.0.0.1:0", "--enable-pprof", "--controllers="+roles)
		e.ready(p, "")
		p.says("Starting controller")
		// A claim that was created afterwards is processed after everything before it.
		name := fmt.Sprintf("last%d", len(heaps))
		e.claim(name, class)
		e.bound(name)
		kubetest.Eventually(t, "the last watch starts", func(context.Context) error {
			if _, ok := watches(e.audited(mark, "storage-controller/"))["volumeattributesclasses"]; !ok {
				return errors.New("it has not started")
			}
			return nil
		})
		heaps[roles] = p.heap()
		p.kill()
		kinds[roles] = slices.Sorted(maps.Keys(watches(e.audited(mark, "storage-controller/"))))
		for _, r := range e.audited(mark, "storage-controller/dev (resizer)") {
			if r.IsWrite() {
				t.Errorf("the resizer wrote %s", r.RequestURI)
			}
		}
	}
	without, with := heaps[others], heaps[others+",resizer"]
	t.Logf("%d claims: %d KiB with the resizer, %d KiB without", claims, with>>10, without>>10)
	if with-without > limit {
		t.Errorf("the resizer needs %d bytes", with-without)
	}
	if a, b := kinds[others], kinds[others+",resizer"]; !slices.Equal(a, b) || len(a) == 0 {
		t.Errorf("watches %v with the resizer, %v without", b, a)
	}
}
