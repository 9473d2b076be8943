// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package e2e compiles to a test program with the External Storage specifications of Kubernetes, without the
// specifications of other components.
package e2e

import (
	"flag"
	"testing"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/gomega"
	"k8s.io/kubernetes/test/e2e/framework"
	"k8s.io/kubernetes/test/e2e/framework/config"
	_ "k8s.io/kubernetes/test/e2e/framework/debug/init" // prints events and pods of a specification that failed
	"k8s.io/kubernetes/test/e2e/framework/testfiles"
	_ "k8s.io/kubernetes/test/e2e/storage/external" // registers the flag --storage.testdriver
	manifests "k8s.io/kubernetes/test/e2e/testing-manifests"
)

// TestMain registers and parses the flags before ginkgo builds the tree of specifications.
func TestMain(m *testing.M) {
	config.CopyFlags(config.Flags, flag.CommandLine)
	framework.RegisterCommonFlags(flag.CommandLine)
	framework.RegisterClusterFlags(flag.CommandLine)
	flag.Parse()
	framework.TestContext.IPFamily = "ipv4"
	testfiles.AddFileSource(manifests.GetE2ETestingManifestsFS())
	framework.AfterReadingAllFlags(&framework.TestContext)
	m.Run()
}

func TestExternalStorage(t *testing.T) {
	gomega.RegisterFailHandler(framework.Fail)
	suite, reporter := framework.CreateGinkgoConfig()
	ginkgo.RunSpecs(t, "Kubernetes", suite, reporter)
}
