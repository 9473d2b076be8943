package webhook

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// BenchmarkAdmission is the answer to a review of a pod with ten claims that the caches
// know, over TLS. p99-ms should be below 5 where no claim waits for a volume of the driver.
// Those that do are read once more, ten at the same time, and what that takes is up to
// the API server.
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
	web := f.web()
	for _, kind := range []string{"foreign", "bound", "pending"} {
		b.Run(kind, func(b *testing.B) {
			body := reviewOf(b, f.ns, "pods", pods[kind])
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
				if patched := bytes.Contains(data, []byte("patchType")); err != nil || response.StatusCode != 200 || patched != (kind == "pending") {
					b.Fatalf("%d %s %v", response.StatusCode, data, err)
				}
			}
			slices.Sort(times)
			b.ReportMetric(float64(times[len(times)*99/100].Microseconds())/1000, "p99-ms")
			b.ReportMetric((f.metric("storage_controller_webhook_live_reads_total")-reads)/float64(len(times)), "reads/op")
		})
	}
}
