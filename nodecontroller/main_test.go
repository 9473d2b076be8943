package nodecontroller

import (
	"testing"
	"time"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

const pvcProtection = "kubernetes.io/pvc-protection"

var testNow = time.Date(2026, 5, 6, 7, 8, 9, 0, time.UTC)
