// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// BenchmarkAdmission is the answer to a review of a pod with ten claims that the caches
// know, over TLS. p99-ms should be below 5. Claims that wait for a volume of the driver are
// read once more, and "busy" is that while other objects are written all the time, for
// which lists of the API server have to wait.
func BenchmarkAdmission(b *testing.B) {
	f := setup(b, nil)
	ours, theirs := f.class("ours", "dc1"), f.class("theirs", "", foreign)
	pods := map[string]*corev1.Pod{"foreign": podOf("p-"), "bound": podOf("p-"), "pending": podOf("p-")}
	for i := range 10 {
		for kind, pod := range pods {
			class := ours
			if kind == "foreign" {
				class = theirs
			}
			name := f.claim(fmt.Sprintf("%s-%d", kind, i), class, "1Gi")
			if kind == "bound" {
				f.bind(name)
				f.cached(name, corev1.ClaimBound)
			}
			pod.Spec.Volumes = append(pod.Spec.Volumes, claimVolume(fmt.Sprint("v", i), name))
		}
	}
	for _, kind := range []string{"foreign", "bound", "pending"} {
		b.Run(kind, func(b *testing.B) { f.admit(b, pods[kind], kind == "pending") })
	}
	b.Run("busy", func(b *testing.B) {
		defer f.keepBusy()()
		f.admit(b, pods["pending"], true)
	})
}

// admit measures the answers to reviews of pod, which must have a patch or none.
func (f *fixture) admit(b *testing.B, pod *corev1.Pod, patched bool) {
	web, body := f.web(), reviewOf(b, f.ns, "pods", pod)
	var times []time.Duration
	reads := f.metric("storage_controller_webhook_live_reads_total")
	for b.Loop() {
		begin := time.Now()
		response, err := web.Post("https://"+f.s.Address()+"/pod/mutate", "application/json", bytes.NewReader(body))
		if err != nil {
			b.Fatal(err)
		}
		data, err := io.ReadAll(response.Body)
		response.Body.Close()
		times = append(times, time.Since(begin))
		if err != nil || response.StatusCode != 200 || bytes.Contains(data, []byte("patchType")) != patched {
			b.Fatalf("%d %s %v", response.StatusCode, data, err)
		}
	}
	slices.Sort(times)
	for _, percent := range []int{50, 99} {
		b.ReportMetric(float64(times[len(times)*percent/100].Microseconds())/1000, fmt.Sprintf("p%d-ms", percent))
	}
	b.ReportMetric((f.metric("storage_controller_webhook_live_reads_total")-reads)/float64(len(times)), "reads/op")
}

// keepBusy writes an object of another kind a hundred times a second, until stop.
func (f *fixture) keepBusy() (stop func()) {
	ctx, cancel := context.WithCancel(f.Context())
	maps := f.client.CoreV1().ConfigMaps(f.ns)
	written, err := maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "busy-"}}, metav1.CreateOptions{})
	f.must(err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for n := 0; ctx.Err() == nil; n++ {
			<-tick.C
			written.Data = map[string]string{"n": fmt.Sprint(n)}
			if next, err := maps.Update(ctx, written, metav1.UpdateOptions{}); err == nil {
				written = next
			} else if ctx.Err() == nil {
				f.Error(err)
				return
			}
		}
	}()
	return func() { cancel(); <-done }
}
