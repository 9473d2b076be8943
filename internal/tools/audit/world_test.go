package audit

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// TestHintAtAPermission: it is given where one is missing, and not when nobody answers.
func TestHintAtAPermission(t *testing.T) {
	t.Parallel()
	forbids := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "no", http.StatusForbidden)
	}))
	defer forbids.Close()
	for host, hint := range map[string]bool{forbids.URL: true, "http://127.0.0.1:1": false} {
		client, err := kubernetes.NewForConfig(&rest.Config{Host: host})
		if err != nil {
			t.Fatal(err)
		}
		if _, err = NewLive(client, nil, "d").World(t.Context()); err == nil || strings.Contains(err.Error(), "grant list") != hint || !strings.Contains(err.Error(), "listing the PersistentVolumes") {
			t.Errorf("%s: %v", host, err)
		}
	}
}
